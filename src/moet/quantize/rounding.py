"""Codes and scales of the 2-bit base on torch tensors: nearest codes, E4M3 scales, the result.

Levels 1 to 3 work on a `Draft`: rows of one matrix, or of several that share their input, each row
with the factor of its matrix. Everything runs on the device that the weights are on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moet.formats.numbers import E4M3_VALUES
from moet.quantize.base import BLOCK, SCALE_MAX_BYTE, SCALE_MIN_BYTE, TwoBitMatrix

# max|w| in units of the factor. Level 0 never needs a scale above 0.4 max|w|; error feedback makes
# weights grow, so here twice that is representable (112 / 128 = 0.875 max|w|).
_STEPS = 128
_SMALLEST_NORMAL = float(torch.finfo(torch.float32).tiny)


@dataclass
class Draft:
    """Rows of the base while it is being chosen; the value is levels · scale.

    levels: float32 [N, K], ±1 or ±4. scale: float32 [N, K / 32], each an allowed E4M3 number times
    the row's factor, or 0 for a block of zeros. factor: float32 [N, 1].
    """

    levels: Tensor
    scale: Tensor
    factor: Tensor

    def values(self) -> Tensor:
        """float32 [N, K]."""
        return self.levels * self.scale.repeat_interleave(BLOCK, 1)

    def rows(self, start: int, stop: int) -> TwoBitMatrix:
        """Rows of one matrix in the form that packs hold. They must have one factor."""
        levels, scale, factor = (
            part[start:stop] for part in (self.levels, self.scale, self.factor)
        )
        byte = scale_bytes(scale, factor)
        big = levels.abs() > 2
        codes = big.to(torch.uint8) | (levels < 0).to(torch.uint8) << 1
        codes *= (byte != 0).repeat_interleave(BLOCK, 1)
        return TwoBitMatrix(codes.cpu().numpy(), byte.cpu().numpy(), float(factor[0, 0]))


def factor_of(weight: Tensor) -> Tensor:
    """The factor of a float32 matrix, as a column [N, 1]: max|w| / 128, or 1 for zeros."""
    largest = float(weight.abs().amax())
    factor = max(largest / _STEPS, _SMALLEST_NORMAL) if largest else 1.0
    return torch.full((len(weight), 1), factor, device=weight.device)


@dataclass(frozen=True)
class BlockScale:
    """One block's scale of every row, float32 [N], and what rounding to it needs.

    Rounding goes column by column, so on a GPU the number of operations is the time it takes.
    """

    small: Tensor
    big: Tensor
    middle: Tensor

    @classmethod
    def of(cls, scale: Tensor) -> BlockScale:
        return cls(scale, 4 * scale, 2.5 * scale)

    def nearest(self, weight: Tensor, out: Tensor) -> None:
        """Writes the nearest of ±scale, ±4 · scale into `out`; 0 keeps its sign bit."""
        size = torch.where(weight.abs() > self.middle, self.big, self.small)
        torch.copysign(size, weight, out=out)


def levels_of(values: Tensor, scale: Tensor) -> Tensor:
    """±1 or ±4, float32 [N, 32], of values that are such multiples of `scale` [N, 1]."""
    big = values.abs() > 2.5 * scale
    return torch.copysign(torch.where(big, 4.0, 1.0), values)


def round_scale(scale: Tensor, factor: Tensor) -> Tensor:
    """The nearest allowed scale, float32: E4M3 from 2^-6 to 112 times `factor`, or 0."""
    byte = scale_bytes(scale, factor)
    return scale_table(scale.device)[byte.long()] * factor


def scale_bytes(scale: Tensor, factor: Tensor) -> Tensor:
    """The E4M3 byte, uint8, of the nearest allowed scale; 0 for what is nearest to 0, and NaN."""
    table = scale_table(scale.device)[SCALE_MIN_BYTE : SCALE_MAX_BYTE + 1]
    middles = torch.cat([table[:1] / 2, (table[1:] + table[:-1]) / 2])
    # Where the value is an E4M3 number times the factor the quotient may be off by a rounding,
    # which is far from a middle.
    place = torch.bucketize((scale / factor).nan_to_num(0.0), middles)
    return torch.where(place > 0, place + (SCALE_MIN_BYTE - 1), 0).to(torch.uint8)


def scale_table(device: torch.device) -> Tensor:
    """float32 [128]: the values of the positive E4M3 bytes."""
    return torch.tensor(E4M3_VALUES[:128], dtype=torch.float32, device=device)


def draft_of(matrices: Sequence[TwoBitMatrix], device: torch.device) -> Draft:
    """Matrices of the base one below the other, each with its factor."""
    codes, byte = (
        torch.from_numpy(np.concatenate(parts)).to(device)
        for parts in ([m.codes for m in matrices], [m.scales for m in matrices])
    )
    factor = torch.cat([torch.full((len(m.codes), 1), m.factor) for m in matrices]).to(device)
    levels = (1.0 + 3.0 * (codes & 1)) * (1.0 - (codes & 2))
    return Draft(levels, scale_table(device)[byte.long()] * factor, factor)
