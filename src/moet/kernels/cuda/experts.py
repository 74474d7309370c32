"""The routed experts of a layer on the GPU: device tables in, device tensor out, no host sync."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moet.errors import ConfigError, UnsupportedError
from moet.formats.layout import Precision, RowLayout
from moet.kernels.base import SwiGLU
from moet.kernels.cuda.compiler import cached_cubin
from moet.kernels.cuda.launch import Kernel
from moet.kernels.cuda.target import Target

PRECISION_CODES = {Precision.BASE: 0, Precision.MXFP4: 1, Precision.NVFP4: 2}
"""Values of the precision table; `enum Precision` of weights.cuh."""

REMOTE = 0x80
"""Added to a precision where the row lies in host memory: its work is spread differently, its
result is the same."""

DECODE_TOKENS = 16
_WARPS = 16
_STAGE_BYTES = 18 * 1024


@dataclass(frozen=True)
class ExpertsShape:
    """What the kernels are compiled for. `slices` are those of the rank's rows."""

    hidden: int
    intermediate: int
    slices: int
    num_experts: int
    top_k: int

    @classmethod
    def of(
        cls, layouts: Mapping[Precision, RowLayout], num_experts: int, top_k: int
    ) -> ExpertsShape:
        """The shape that all layouts agree on; raises UnsupportedError when they do not."""
        shapes = {(v.hidden, v.intermediate, v.slices) for v in layouts.values()}
        if len(shapes) != 1:
            raise UnsupportedError(f"the rows of a layer differ in geometry: {sorted(shapes)}.")
        return cls(*shapes.pop(), num_experts, top_k)

    def defines(self) -> dict[str, int]:
        """The compile-time constants of the sources."""
        return {
            "HIDDEN": self.hidden, "INTER": self.intermediate, "SLICES": self.slices,
            "EXPERTS": self.num_experts, "TOPK": self.top_k,
        }  # fmt: skip


class CudaExperts:
    """Compiled kernels and workspace for one shape on one device.

    Layers of the same shape share an instance. `forward` may be captured in a CUDA graph; two
    calls on one instance must not run at the same time (they share the workspace).
    """

    def __init__(
        self,
        shape: ExpertsShape,
        device: torch.device,
        out_dtype: torch.dtype = torch.float32,
        fp8_activations: bool = False,
    ) -> None:
        if out_dtype not in (torch.float32, torch.bfloat16):
            raise ConfigError(f"the experts' output can be float32 or bfloat16, not {out_dtype}.")
        self.shape = shape
        self.device = device
        self.out_dtype = out_dtype
        self._fp8_activations = fp8_activations
        with torch.cuda.device(device):
            properties: Any = torch.cuda.get_device_properties(device)
            self._blocks = properties.multi_processor_count
            self._target = Target.of(properties.major, properties.minor)
            self._in_fp8 = self._target.decode == "decode_fp8.cu"
            self._decode = self._decode_kernel(properties.shared_memory_per_block_optin)
            pairs = DECODE_TOKENS * shape.top_k
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
            "MAX_TOKENS": DECODE_TOKENS, "WARPS": _WARPS,
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
    ) -> None:
        """out[t] (+)= Σ over t's experts, ascending, of weight · FFN_e(x[t]); all on the device.

        x: bfloat16 [T, hidden]. topk_ids: int32 [T, k], −1 skipped. topk_weights: float32 [T, k].
        address_table: int64 [E], where the rank's run of slices of each expert's row begins, 0 =
        skip. precision_table: uint8 [E] of PRECISION_CODES, + REMOTE for rows in host memory.
        factor_table: float32 [E, 3]. out: [T, hidden] of the instance's dtype. All contiguous, on the instance's device. Rows may
        lie in GPU memory or in pinned host memory. Beyond 16 tokens, every 16 read their experts
        again.
        """
        limit = float("inf") if activation.limit is None else activation.limit
        stream = torch.cuda.current_stream(self.device).cuda_stream
        for first in range(0, x.shape[0], DECODE_TOKENS):
            part = slice(first, first + DECODE_TOKENS)
            self._decode.launch(
                (self._blocks, 1), self._threads, stream,
                [x[part], topk_ids[part], topk_weights[part], address_table, precision_table,
                 factor_table, *self._workspace, out[part], self._arrivals,
                 len(x[part]), self._stages, limit, int(accumulate)],
                cooperative=True,
            )  # fmt: skip
