"""FP8 with 128 × 128 blocks, as DeepSeek-V3 publishes its weights: E4M3 and float32 scales."""

from __future__ import annotations

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from moet.formats.base import FORMATS, BlockFormat, Parts
from moet.formats.numbers import E4M3_MAX, E4M3_VALUES, encode_e4m3
from moet.formats.parts import (
    require,
    require_finite,
    require_matrix,
    require_rule,
    require_scales,
    require_shape,
    require_weight,
)

BLOCK = 128


class FP8Block(BlockFormat):
    """Parts: `weight` float8_e4m3fn [N, K]; `scale_inv` float32 [ceil(N/128), ceil(K/128)].

    The value is weight · scale_inv ("inv" is the checkpoints' own name; it is multiplied). float64
    holds it exactly; float32 holds the nearest number (28 significant bits at most in full).

    Scale rule: `amax`, amax / 448 of the block.
    """

    name = "fp8_block"
    parts = ("weight", "scale_inv")
    bits = 8 + 32 / BLOCK**2

    def decode(self, parts: Parts, dtype: torch.dtype = torch.float32) -> Tensor:
        codes = require_matrix(parts, "weight", (torch.float8_e4m3fn,))
        scale = require(parts, "scale_inv", (torch.float32,))
        require_shape(scale, "scale_inv", _grid(codes))
        require_scales(scale, "scale_inv")
        weight = torch.empty(codes.shape, dtype=dtype, device="cpu")
        out = weight.numpy()
        # One multiplication in `dtype`: in float64 exact, in float32 the product correctly rounded.
        values, factors = E4M3_VALUES.astype(out.dtype), scale.to(dtype).numpy()
        _decode(codes.view(torch.uint8).numpy(), values, factors, out)
        require_finite(weight, "weight")
        return weight

    def encode(self, weight: Tensor, rule: str) -> dict[str, Tensor]:
        require_rule(self.name, rule, ("amax",))
        require_weight(weight)
        scale = torch.empty(_grid(weight), dtype=torch.float32)
        codes = torch.empty(weight.shape, dtype=torch.uint8)
        for i in range(scale.shape[0]):
            for j in range(scale.shape[1]):
                at = (slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK))
                step = weight[at].abs().max() / E4M3_MAX
                # 1 for a block of zeros; the smallest normal number where amax / 448 is below it.
                tiny = torch.finfo(torch.float32).tiny
                scale[i, j] = step.clamp(min=tiny) if weight[at].any() else 1.0
                codes[at] = encode_e4m3(weight[at].double() / scale[i, j].double())
        return {"weight": codes.view(torch.float8_e4m3fn), "scale_inv": scale}


def _grid(weight: Tensor) -> tuple[int, int]:
    return -(-weight.shape[0] // BLOCK), -(-weight.shape[1] // BLOCK)


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _decode(
    codes: NDArray[np.uint8],
    values: NDArray[np.floating],
    factors: NDArray[np.floating],
    out: NDArray[np.floating],
) -> None:
    for n in range(codes.shape[0]):
        for block in range(factors.shape[1]):
            factor = factors[n // BLOCK, block]
            for k in range(block * BLOCK, min((block + 1) * BLOCK, codes.shape[1])):
                out[n, k] = values[codes[n, k]] * factor


FORMATS.register(FP8Block.name)(FP8Block())
