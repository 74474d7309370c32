"""NVFP4: E2M1 codes, one E4M3 scale for 16 weights, one float32 scale for the matrix.

The layout of NVIDIA Model Optimizer's checkpoints: `weight`, `weight_scale`, `weight_scale_2`. The
value of a weight is code · scale · global_scale, the two-level scaling of the NVFP4 recipe
(global = amax / (6 · 448), so that the largest block's scale is E4M3's largest number).
"""

from __future__ import annotations

import torch
from torch import Tensor

from moet.formats.base import FORMATS, BlockFormat, Parts
from moet.formats.fp4_search import encode_blocks
from moet.formats.layout import Matrix, Precision
from moet.formats.matrices import decode_to, pack_nibbles, unpack_nibbles
from moet.formats.numbers import (
    E2M1_MAX,
    E4M3_MAX,
    E4M3_VALUES,
    decode_e4m3,
    encode_e4m3,
)
from moet.formats.parts import (
    refuse_where,
    require,
    require_finite,
    require_matrix,
    require_rule,
    require_scales,
    require_shape,
    require_weight,
)

BLOCK = 16
MAX_SCALE = 0x7E  # the byte of 448; above it only NaN and negative numbers
# least_error tries the scales from amax / 8 upwards, this many. Below amax / 8 (even amax / 8
# itself), clipping amax costs more than doubling the step costs the 15 other weights; from amax / 3
# on, half the scale has every value of the whole within reach. 8/3 is less than 13 steps of E4M3.
CANDIDATES = 14


class NVFP4(BlockFormat):
    """Parts: `codes` uint8 [N, K/2], even k in the low nibble; `scale` float8_e4m3fn [N, K/16];
    `global_scale` float32, one value, the checkpoint's `weight_scale_2`.

    A value in full has up to 30 significant bits. float64 holds it exactly; float32 holds the
    nearest number, which is exact when global_scale has no more than 18 significant bits.

    Scale rules: `amax`, amax / 6 / global_scale in E4M3; `least_error`, the E4M3 number with the
    least squared error of the block under the same global_scale.
    """

    name = "nvfp4"
    parts = ("codes", "scale", "global_scale")
    bits = 4.5

    def matrix(self, parts: Parts) -> tuple[Matrix, float]:
        """Codes and scale bytes as stored, one code a byte, and global_scale.

        Raises CheckpointError as `decode` does.
        """
        codes = require_matrix(parts, "codes", (torch.uint8,), BLOCK // 2)
        scale = require(parts, "scale", (torch.float8_e4m3fn,))
        require_shape(scale, "scale", (codes.shape[0], 2 * codes.shape[1] // BLOCK))
        # As bytes, so that −0 is refused as well: kernels read the byte as a number without sign.
        data = scale.view(torch.uint8)
        refuse_where(data > MAX_SCALE, "scale", scale.float(), "a scale must be finite and ≥ +0")
        factor = require(parts, "global_scale", (torch.float32,))
        if factor.numel() != 1:
            require_shape(factor, "global_scale", (1,))
        require_scales(factor.reshape(1), "global_scale")
        return Matrix(unpack_nibbles(codes), data.numpy()), factor.item()

    def decode(self, parts: Parts, dtype: torch.dtype = torch.float32) -> Tensor:
        """W [N, K]: the exact value in float64, the nearest number in float32."""
        matrix, factor = self.matrix(parts)
        weight = decode_to(Precision.NVFP4, matrix, factor, dtype)
        require_finite(weight, "codes")
        return weight

    def encode(self, weight: Tensor, rule: str) -> dict[str, Tensor]:
        require_rule(self.name, rule, ("amax", "least_error"))
        require_weight(weight, BLOCK)
        factor = _global_scale(weight)
        amax = weight.reshape(weight.shape[0], -1, BLOCK).abs().amax(-1).double() / factor.double()
        # A block that is not all zero gets a scale that is not zero: the smallest, if need be.
        if rule == "amax":
            first, count = encode_e4m3(amax / E2M1_MAX).int().clamp(min=1), 1
        else:
            first, count = _floor_e4m3(amax / 8).clamp(min=1), CANDIDATES
        codes, scales = encode_blocks(
            weight.contiguous().numpy(), BLOCK, first.numpy(), count, MAX_SCALE, E4M3_VALUES,
            factor.item(),
        )  # fmt: skip
        scale = torch.from_numpy(scales).masked_fill_(amax == 0, 0)
        return {
            "codes": pack_nibbles(torch.from_numpy(codes)),
            "scale": scale.view(torch.float8_e4m3fn),
            "global_scale": factor,
        }


def _global_scale(weight: Tensor) -> Tensor:
    """float32 scalar; 1 for a matrix of zeros, and never zero."""
    amax = weight.abs().max()
    if amax == 0:
        return torch.ones((), dtype=torch.float32)
    return (amax / (E2M1_MAX * E4M3_MAX)).clamp(min=torch.finfo(torch.float32).tiny)


def _floor_e4m3(values: Tensor) -> Tensor:
    """The byte, int32, of the largest E4M3 number that is not above the value (≥ 0)."""
    nearest = encode_e4m3(values).int()
    return nearest - (decode_e4m3(nearest, values.dtype) > values).int()


FORMATS.register(NVFP4.name)(NVFP4())
