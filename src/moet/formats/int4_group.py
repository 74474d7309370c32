"""INT4 in groups of 32, symmetric: the `pack-quantized` layout of compressed-tensors."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from moet.formats.base import FORMATS, BlockFormat, Parts
from moet.formats.matrices import pack_nibbles, unpack_nibbles
from moet.formats.parts import (
    require,
    require_finite,
    require_matrix,
    require_rule,
    require_scales,
    require_shape,
    require_weight,
)

GROUP = 32
OFFSET = 8  # nibble 8 is the value 0


class INT4Group(BlockFormat):
    """Parts: `codes` int32 [N, K/8], the checkpoint's `weight_packed`: eight nibbles a word, the
    lowest first, each the value + 8; `scale` bfloat16 or float32 [N, K/32].

    float64 holds every value exactly, and so does float32 when the scale is bfloat16; a float32
    scale makes it the nearest float32 number (28 significant bits at most in full).

    Scale rule: `amax`, amax / 7.5 in bfloat16, compressed-tensors' own; codes −8..7.
    """

    name = "int4_group"
    parts = ("codes", "scale")
    bits = 4 + 16 / GROUP

    def decode(self, parts: Parts, dtype: torch.dtype = torch.float32) -> Tensor:
        words = require_matrix(parts, "codes", (torch.int32,), GROUP // 8)
        scale = require(parts, "scale", (torch.bfloat16, torch.float32))
        rows, groups = words.shape[0], 8 * words.shape[1] // GROUP
        require_shape(scale, "scale", (rows, groups))
        require_scales(scale, "scale")
        # The words are little-endian on disk and here, so the bytes hold the nibbles in order.
        nibbles = unpack_nibbles(words.view(torch.uint8)).view(np.int8)
        weight = torch.from_numpy(nibbles - np.int8(OFFSET)).to(dtype)
        weight.view(rows, groups, GROUP).mul_(scale.to(dtype)[..., None])
        require_finite(weight, "codes")
        return weight

    def encode(self, weight: Tensor, rule: str) -> dict[str, Tensor]:
        require_rule(self.name, rule, ("amax",))
        require_weight(weight, GROUP)
        groups = weight.double().reshape(weight.shape[0], -1, GROUP)
        amax = groups.abs().amax(-1)
        tiny = torch.finfo(torch.bfloat16).tiny
        scale = torch.where(amax > 0, (amax / 7.5).clamp(min=tiny), 1.0).to(torch.bfloat16)
        values = torch.round(groups / scale.double()[..., None]).clamp(-OFFSET, OFFSET - 1)
        nibbles = (values + OFFSET).to(torch.uint8).reshape(weight.shape)
        return {"codes": pack_nibbles(nibbles).view(torch.int32), "scale": scale}


FORMATS.register(INT4Group.name)(INT4Group())
