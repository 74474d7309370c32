"""MXFP4 (OCP Microscaling Formats 1.0): E2M1 codes, one E8M0 scale for 32 weights."""

from __future__ import annotations

import torch
from torch import Tensor

from moet.formats.base import FORMATS, BlockFormat, Parts
from moet.formats.fp4_search import encode_blocks
from moet.formats.layout import Matrix, Precision
from moet.formats.matrices import decode_to, pack_nibbles, unpack_nibbles
from moet.formats.numbers import (
    E8M0_BIAS,
    E8M0_NAN,
    E8M0_VALUES,
    floor_log2,
)
from moet.formats.parts import (
    refuse_where,
    require,
    require_finite,
    require_matrix,
    require_rule,
    require_shape,
    require_weight,
)

BLOCK = 32


class MXFP4(BlockFormat):
    """Parts: `codes` uint8 or int8 [N, K/2], even k in the low nibble; `scale` E8M0 [N, K/32], as
    float8_e8m0fnu or as uint8 bytes.

    Scale rules: `ocp`, 2^(floor(log2 amax) − 2), the specification's (§6.3); `least_error`, the
    power of two with the least squared error of the block.
    """

    name = "mxfp4"
    parts = ("codes", "scale")
    bits = 4.25

    def matrix(self, parts: Parts) -> Matrix:
        """Codes and scale bytes as stored, one code a byte; the factor is 1.

        Raises CheckpointError as `decode` does.
        """
        codes = require_matrix(parts, "codes", (torch.uint8, torch.int8), BLOCK // 2)
        scale = require(parts, "scale", (torch.float8_e8m0fnu, torch.uint8)).view(torch.uint8)
        require_shape(scale, "scale", (codes.shape[0], 2 * codes.shape[1] // BLOCK))
        refuse_where(scale == E8M0_NAN, "scale", scale, "in E8M0 that is NaN")
        return Matrix(unpack_nibbles(codes), scale.numpy())

    def decode(self, parts: Parts, dtype: torch.dtype = torch.float32) -> Tensor:
        """W [N, K]; refuses a weight beyond `dtype`'s range (6 · 2^127 is no float32 number)."""
        weight = decode_to(Precision.MXFP4, self.matrix(parts), 1.0, dtype)
        require_finite(weight, "codes")
        return weight

    def encode(self, weight: Tensor, rule: str) -> dict[str, Tensor]:
        require_rule(self.name, rule, ("ocp", "least_error"))
        require_weight(weight, BLOCK)
        amax = weight.reshape(weight.shape[0], -1, BLOCK).abs().amax(-1)
        first, count = (floor_log2(amax) - 2 + E8M0_BIAS).clamp(min=0), 1
        if rule == "least_error":
            # The neighbours are enough. Two steps up, the grid within reach of amax is a part of
            # the grid one step up; two down, clipping amax alone costs more than the finer grid
            # can save on the 31 other weights.
            first, count = (first - 1).clamp(min=0), 3
        codes, scales = encode_blocks(
            weight.contiguous().numpy(), BLOCK, first.numpy(), count, E8M0_NAN - 1, E8M0_VALUES, 1.0
        )
        return {
            "codes": pack_nibbles(torch.from_numpy(codes)),
            "scale": torch.from_numpy(scales).view(torch.float8_e8m0fnu),
        }


FORMATS.register(MXFP4.name)(MXFP4())
