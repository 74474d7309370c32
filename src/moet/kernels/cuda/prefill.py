"""The routed experts of a layer for many tokens, on device tables, without host sync."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moet.errors import ConfigError
from moet.kernels.base import SwiGLU
from moet.kernels.cuda.compiler import cached_cubin
from moet.kernels.cuda.launch import Kernel
from moet.kernels.cuda.shape import ExpertsShape
from moet.kernels.cuda.target import Target

PREFILL_TOKENS = 4096
"""The most tokens of one launch; larger calls run in chunks."""

_TILE_BYTES = 48
_SHARED_BYTES = {"prefill_sm90.cu": 1024 + 220 * 1024, "prefill.cu": 80 * 1024}
_THREADS = {"prefill_sm90.cu": 384, "prefill.cu": 256}
_TILE_TOKENS = {"prefill_sm90.cu": 128, "prefill.cu": 64}
_SLACK = 256  # bytes that a copy of a row's last 128 bytes may read beyond it


class PrefillExperts:
    """Compiled kernels and workspace for one shape on one device.

    Layers of the same shape share an instance. `forward` may be captured in a CUDA graph; two
    calls on one instance must not run at the same time (they share the workspace). With
    `fp8_activations`, base rows take x and h as E4M3 with a scale a token, where the GPU has FP8
    tensor cores; FP4 rows take them in BF16.

    Args:
        max_tokens: the most tokens of one launch, which the workspace is for.
    """

    def __init__(
        self,
        shape: ExpertsShape,
        device: torch.device,
        out_dtype: torch.dtype = torch.float32,
        fp8_activations: bool = False,
        max_tokens: int = PREFILL_TOKENS,
    ) -> None:
        if out_dtype not in (torch.float32, torch.bfloat16):
            raise ConfigError(f"the experts' output can be float32 or bfloat16, not {out_dtype}.")
        self.shape = shape
        self.device = device
        self.out_dtype = out_dtype
        self.max_tokens = max_tokens
        with torch.cuda.device(device):
            properties: Any = torch.cuda.get_device_properties(device)
            target = Target.of(properties.major, properties.minor)
            self._blocks = properties.multi_processor_count
            self._e4m3 = fp8_activations and (properties.major, properties.minor) >= (8, 9)
            self._source = "prefill_sm90.cu" if target.wgmma else "prefill.cu"
            defines = shape.defines() | target.defines() | {
                "FP8_ACTIVATIONS": int(self._e4m3), "TILE_TOKENS": _TILE_TOKENS[self._source],
                "PRECISIONS": shape.precision_bits, "OUT_BF16": int(out_dtype is torch.bfloat16),
            }  # fmt: skip
            around = cached_cubin("prefill_prepare.cu", target.architecture, defines)
            self._prepare = Kernel(around, "prepare")
            self._sum = Kernel(around, "weighted_sum")
            self._quantize = Kernel(around, "quantize_hidden") if self._e4m3 else None
            defines.pop("OUT_BF16")  # these kernels' output is BF16
            products = cached_cubin(self._source, target.architecture, defines)
            shared = _SHARED_BYTES[self._source]
            self._gate_up = Kernel(products, "gate_up", shared)
            self._down = Kernel(products, "down", shared)
            self._allocate()

    def _allocate(self) -> None:
        tokens, pairs = self.max_tokens, self.max_tokens * self.shape.top_k
        hidden, inter = self.shape.hidden, self.shape.intermediate

        def empty(size: int) -> Tensor:
            return torch.empty(size, dtype=torch.uint8, device=self.device)

        tiles = self.shape.num_experts + pairs // _TILE_TOKENS[self._source] + 1
        self._state = empty(16)
        self._tiles = empty(tiles * _TILE_BYTES)
        self._sorted = empty(pairs * 4)
        self._x_base = empty(tokens * hidden * (1 if self._e4m3 else 2) + _SLACK)
        self._x_fp4 = empty(tokens * hidden * 2 + _SLACK)
        self._h = empty(pairs * inter * 2 + _SLACK)
        self._partial = empty(pairs * hidden * 2)
        quantized = self._e4m3
        self._x_scale = empty(tokens * 4 if quantized else 4)
        self._h_scale = empty(pairs * 4 if quantized else 4)
        self._h_e4m3 = empty(pairs * inter + _SLACK) if quantized else self._h

    def forward(
        self,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        address_table: Tensor,
        precision_table: Tensor,
        factor_table: Tensor,
        activation: SwiGLU,
        out: Tensor,
        accumulate: bool = False,
        bias: Tensor | None = None,
    ) -> None:
        """out[t] (+)= Σ over t's experts, ascending, of weight · FFN_e(x[t]); all on the device.

        As `CudaExperts.forward`, for any number of tokens: every `max_tokens` read their experts
        once. h and each expert's output are rounded to BF16 (with `fp8_activations`, h of base rows
        to E4M3).
        """
        limit = float("inf") if activation.limit is None else activation.limit
        biases = [] if bias is None else [bias]
        stream = torch.cuda.current_stream(self.device).cuda_stream
        threads = _THREADS[self._source]
        for first in range(0, x.shape[0], self.max_tokens):
            part = slice(first, first + self.max_tokens)
            ids, tokens = topk_ids[part], len(x[part])
            self._prepare.launch(
                (1 + min(2 * self._blocks, tokens // 32 + 1), 1), 1024, stream,
                [x[part], ids, tokens, address_table, precision_table, factor_table,
                 self._state, self._tiles, self._sorted, self._x_base, self._x_fp4, self._x_scale],
            )  # fmt: skip
            self._gate_up.launch(
                (self._blocks, 1), threads, stream,
                [self._state, self._tiles, self._sorted, self._x_base, self._x_fp4, self._x_scale,
                 self._h, limit, *biases],
            )  # fmt: skip
            if self._quantize is not None:
                self._quantize.launch(
                    (4 * self._blocks, 1), 256, stream,
                    [self._state, self._tiles, self._h, self._h_e4m3, self._h_scale],
                )  # fmt: skip
            self._down.launch(
                (self._blocks, 1), threads, stream,
                [self._state, self._tiles, self._sorted, self._h_e4m3, self._h, self._h_scale,
                 self._partial, limit, *biases],
            )  # fmt: skip
            self._sum.launch(
                (tokens, 1), 256, stream,
                [self._partial, ids, topk_weights[part], address_table, out[part], int(accumulate)],
            )  # fmt: skip
