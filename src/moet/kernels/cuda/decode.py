"""The routed experts of a layer on the GPU for a few tokens: one persistent kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moet.errors import UnsupportedError
from moet.kernels.base import SwiGLU
from moet.kernels.cuda.compiler import cached_cubin
from moet.kernels.cuda.dispatch import DECODE_TOKENS
from moet.kernels.cuda.launch import Kernel
from moet.kernels.cuda.shape import ExpertsShape
from moet.kernels.cuda.target import Target

_WARPS = 16
_MAX_PAIRS = 256  # the plan numbers them in bytes
_STAGE_BYTES = 18 * 1024


class DecodeExperts:
    """The compiled kernel and its workspace, for one shape on one device.

    With `fp8_activations`, x and h are rounded to E4M3 where the kernel computes in FP8.

    Args:
        most_tokens: the most tokens of one launch; where a token has many experts, `max_tokens`,
            which a launch takes, is smaller.
    """

    def __init__(
        self,
        shape: ExpertsShape,
        device: torch.device,
        out_dtype: torch.dtype = torch.float32,
        fp8_activations: bool = False,
        most_tokens: int = DECODE_TOKENS,
    ) -> None:
        self.shape = shape
        self.max_tokens = min(most_tokens, _MAX_PAIRS // shape.top_k)
        self.device = device
        self.out_dtype = out_dtype
        self._fp8_activations = fp8_activations
        with torch.cuda.device(device):
            properties: Any = torch.cuda.get_device_properties(device)
            self._blocks = properties.multi_processor_count
            self._target = Target.of(properties.major, properties.minor)
            self._in_fp8 = self._target.decode == "decode_fp8.cu"
            self._decode = self._decode_kernel(properties.shared_memory_per_block_optin)
            pairs = self.max_tokens * shape.top_k
            # 64-bit words of a value and the launch's number; h in BF16 is plain.
            h_bytes = 4 if self._in_fp8 else 2
            words: dict[str, Any] = {"dtype": torch.int64, "device": device}
            self._workspace = [
                torch.zeros(pairs, shape.intermediate * h_bytes, dtype=torch.uint8, device=device),
                torch.zeros(pairs, shape.intermediate // 32, **words),
                torch.zeros(pairs, shape.hidden, **words),
            ]
            self._arrivals = torch.zeros(1, **words)

    def _decode_kernel(self, shared_memory: int) -> Kernel:
        """The kernel for this GPU, with as many ring stages as shared memory holds."""
        defines = self.shape.defines() | self._target.defines() | {
            "MAX_TOKENS": self.max_tokens, "WARPS": _WARPS,
            "OUT_BF16": int(self.out_dtype is torch.bfloat16),
        }  # fmt: skip
        columns = 0
        helpers = 1
        if self._in_fp8:
            defines["FP8_ACTIVATIONS"] = int(self._fp8_activations)
            # Two sides of eight columns, each with a k block of zeros.
            columns = 2 * (8 * max(self.shape.hidden, self.shape.intermediate) + 256)
            helpers = 4
        self._threads = (_WARPS + helpers) * 32
        kernel = Kernel(
            cached_cubin(self._target.decode, self._target.architecture, defines), "decode_experts"
        )
        self._stages = min((shared_memory - kernel.static_shared - columns) // _STAGE_BYTES, 32)
        if self._stages < 1:
            raise UnsupportedError(
                f"a hidden size of {self.shape.hidden} needs more shared memory than this GPU's "
                f"{shared_memory} bytes a block."
            )
        kernel.reserve_shared(self._stages * _STAGE_BYTES + columns)
        return kernel

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
        """As `CudaExperts.forward`, for any number of tokens, every `max_tokens` in a launch."""
        limit = float("inf") if activation.limit is None else activation.limit
        biases = [] if bias is None else [bias]
        stream = torch.cuda.current_stream(self.device).cuda_stream
        for first in range(0, len(x), self.max_tokens):
            part = slice(first, first + self.max_tokens)
            self._decode.launch(
                (self._blocks, 1), self._threads, stream,
                [x[part], topk_ids[part], topk_weights[part], address_table, precision_table,
                 factor_table, *self._workspace, out[part], self._arrivals, len(x[part]),
                 self._stages, limit, int(accumulate), *biases],
                cooperative=True,
            )  # fmt: skip
