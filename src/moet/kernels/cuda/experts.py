"""The routed experts of a layer on the GPU: device tables in, device tensor out, no host sync."""

from __future__ import annotations

import torch
from torch import Tensor

from moet.errors import ConfigError
from moet.kernels.base import GPT_OSS, SwiGLU
from moet.kernels.cuda.decode import DecodeExperts
from moet.kernels.cuda.dispatch import SEVERAL_TOKENS, most_decoded
from moet.kernels.cuda.prefill import PREFILL_TOKENS, PrefillExperts
from moet.kernels.cuda.shape import ExpertsShape


class CudaExperts:
    """Compiled kernels and workspace for one shape on one device.

    Layers of the same shape share an instance. `forward` may be captured in a CUDA graph; two
    calls on one instance must not run at the same time (they share the workspace). Up to
    `decoded_tokens` go through the decode kernel, more through the prefill kernels; the two round
    differently.

    Its activation is SwiGLU, with a limit or without; of a shape with `gpt_oss`, gpt-oss's, with
    biases.

    Args:
        fp8_activations: x and h may be rounded to E4M3 where that is faster.
        prefill_tokens: the most tokens of one prefill launch, which its workspace is for.
        batch_invariant: the prefill kernels compute every call, so that a token's output does not
            depend on how many others it has.
    """

    name = "cuda"

    def __init__(
        self,
        shape: ExpertsShape,
        device: torch.device,
        out_dtype: torch.dtype = torch.float32,
        fp8_activations: bool = False,
        prefill_tokens: int = PREFILL_TOKENS,
        batch_invariant: bool = False,
    ) -> None:
        if out_dtype not in (torch.float32, torch.bfloat16):
            raise ConfigError(f"the experts' output can be float32 or bfloat16, not {out_dtype}.")
        self.shape = shape
        self.any_swiglu = shape.gpt_oss
        self.out_dtype = out_dtype
        self._few = DecodeExperts(shape, device, out_dtype, fp8_activations)
        self._several = DecodeExperts(shape, device, out_dtype, fp8_activations, SEVERAL_TOKENS)
        self.decoded_tokens = most_decoded(shape, self._several.max_tokens)
        self._batch_invariant = batch_invariant
        self._prefill = PrefillExperts(shape, device, out_dtype, fp8_activations, prefill_tokens)

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

        x: bfloat16 [T, hidden]. topk_ids: int32 [T, k], −1 skipped. topk_weights: float32 [T, k].
        address_table: int64 [E], where the rank's run of slices of each expert's row begins, 0 =
        skip. precision_table: uint8 [E] of PRECISION_CODES, + REMOTE for rows in host memory.
        factor_table: float32 [E, 3]. out: [T, hidden] of the instance's dtype. bias: float32
        [E, 2, intermediate of the rank], of gate and up, where the shape is gpt-oss's. All
        contiguous, on the instance's device. Rows may lie in GPU memory or in pinned host memory.
        The tables must not change while the kernels run: blocks that read different marks would
        share the work wrongly.

        Raises ConfigError for another activation than the kernels were compiled for.
        """
        if not self.shape.gpt_oss == (activation == GPT_OSS) == (bias is not None):
            raise ConfigError(f"kernels for {self.shape} do not compute {activation}.")
        kernels: DecodeExperts | PrefillExperts = self._prefill
        if self._batch_invariant:
            pass
        elif len(x) <= self._few.max_tokens:
            kernels = self._few
        elif len(x) <= self.decoded_tokens:
            kernels = self._several
        kernels.forward(
            x, topk_ids, topk_weights, address_table, precision_table, factor_table, activation,
            out, accumulate, bias,
        )  # fmt: skip
