"""Plain floating-point weights: BF16, and the F16 and F32 that some checkpoints hold instead."""

from __future__ import annotations

import torch
from torch import Tensor

from moet.formats.base import FORMATS, BlockFormat, Parts
from moet.formats.parts import require_finite, require_matrix, require_rule, require_weight


class BF16(BlockFormat):
    """Part: `weight` bfloat16, float16 or float32 [N, K]. `bits` is that of the first two.

    Scale rule: `nearest`, to bfloat16.
    """

    name = "bf16"
    parts = ("weight",)
    bits = 16.0

    def decode(self, parts: Parts, dtype: torch.dtype = torch.float32) -> Tensor:
        """W [N, K], a copy even where the dtype is the same."""
        stored = require_matrix(parts, "weight", (torch.bfloat16, torch.float16, torch.float32))
        require_finite(stored, "weight")
        return stored.to(dtype, copy=True)

    def encode(self, weight: Tensor, rule: str) -> dict[str, Tensor]:
        require_rule(self.name, rule, ("nearest",))
        require_weight(weight)
        largest = torch.finfo(torch.bfloat16).max
        return {"weight": weight.clamp(-largest, largest).to(torch.bfloat16)}


FORMATS.register(BF16.name)(BF16())
