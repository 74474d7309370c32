"""An expert's stored parts, on a GPU, as float32: to the bits of the CPU's decoding."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from moet.formats.base import Parts
from moet.formats.numbers import E2M1_VALUES, E4M3_VALUES, E8M0_NAN, E8M0_VALUES
from moet.formats.nvfp4 import MAX_SCALE

_FP8_BLOCK = 128
_INT4_OFFSET = 8


class Stored(NamedTuple):
    """A matrix on the GPU. weight: float32 [N, K]. bad: bool scalar, whether a scale is none.

    fp4: nibbles uint8 [N, K], scale bytes, and the factor, where it is stored as FP4.
    """

    weight: Tensor
    bad: Tensor
    fp4: tuple[Tensor, Tensor, float] | None = None


class Decoder:
    """Decodes every form that experts are stored in."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tables = {
            name: torch.from_numpy(values.astype(np.float32)).to(device)
            for name, values in (
                ("e2m1", E2M1_VALUES), ("e4m3", E4M3_VALUES), ("e8m0", E8M0_VALUES),
            )
        }  # fmt: skip

    def decode(self, format: str, parts: Parts) -> Stored:
        """parts: on the device, but for scalars."""
        decoders: dict[str, Callable[[Parts], Stored]] = {
            "bf16": self._bf16, "fp8_block": self._fp8_block, "int4_group": self._int4_group,
            "mxfp4": self._mxfp4, "nvfp4": self._nvfp4,
        }  # fmt: skip
        return decoders[format](parts)

    def _bf16(self, parts: Parts) -> Stored:
        weight = parts["weight"].float().contiguous()
        return Stored(weight, torch.zeros((), dtype=torch.bool, device=self._device))

    def _fp8_block(self, parts: Parts) -> Stored:
        codes, scale = parts["weight"], parts["scale_inv"]
        rows, cols = codes.shape
        wide = scale.repeat_interleave(_FP8_BLOCK, 0)[:rows]
        wide = wide.repeat_interleave(_FP8_BLOCK, 1)[:, :cols]
        return Stored((codes.float() * wide).contiguous(), _bad(scale))

    def _int4_group(self, parts: Parts) -> Stored:
        words, scale = parts["codes"].contiguous(), parts["scale"].float()
        values = _nibbles(words.view(torch.uint8)).to(torch.int8) - _INT4_OFFSET
        weight = values.float().view(*scale.shape, -1) * scale[..., None]
        return Stored(weight.flatten(1).contiguous(), _bad(scale))

    def _mxfp4(self, parts: Parts) -> Stored:
        scale = parts["scale"].contiguous().view(torch.uint8)
        return self._four_bits(parts["codes"], scale, "e8m0", 1.0, (scale == E8M0_NAN).any())

    def _nvfp4(self, parts: Parts) -> Stored:
        scale = parts["scale"].contiguous().view(torch.uint8)
        factor = float(parts["global_scale"])
        bad = (scale > MAX_SCALE).any() | (not 0 <= factor < math.inf)
        return self._four_bits(parts["codes"], scale, "e4m3", factor, bad)

    def _four_bits(
        self, packed: Tensor, scale: Tensor, scales: str, factor: float, bad: Tensor
    ) -> Stored:
        """As `matrices.decode_to`: code · scale is a float32 number, so only the factor rounds."""
        codes = _nibbles(packed.contiguous().view(torch.uint8))
        weight = self._tables["e2m1"][codes.int()].view(*scale.shape, -1)
        weight *= self._tables[scales][scale.int()][..., None]
        weight *= factor
        return Stored(weight.flatten(1), bad, (codes, scale, factor))


def _nibbles(packed: Tensor) -> Tensor:
    """uint8 [N, K/2], even k in the low nibble → uint8 [N, K]."""
    return torch.stack([packed & 15, packed >> 4], -1).flatten(1)


def _bad(scale: Tensor) -> Tensor:
    """Whether any is negative, infinite or NaN; a bool scalar."""
    return ~((scale >= 0) & (scale < torch.inf)).all()
