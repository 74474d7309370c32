"""How far a 2-bit base is from the weights it stands for, a matrix or many together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from moet.formats.numbers import E4M3_VALUES
from moet.quantize.base import BLOCK, TwoBitMatrix, require_blocks


@dataclass(frozen=True)
class MatrixStatistics:
    """Sums over weights w and their 2-bit values q = level · scale · factor, before any rounding.

    Sums, not ratios, so that statistics of several matrices add up to those of all their weights.

    count: weights. zeros: those with w = 0; negative_zeros: those of them with a negative code,
        about half where zeros lean to no side. codes: how many of each code (+1, +4, −1, −4).
    squares: Σ w². magnitudes: Σ |w|. squared_errors: Σ (q − w)². errors: Σ (q − w).
    scale_min, scale_max: least and largest scale · factor of a block that is not zero, in units of
        the weights; inf and 0 if there is none.
    """

    count: int
    zeros: int
    negative_zeros: int
    codes: tuple[int, int, int, int]
    squares: float
    magnitudes: float
    squared_errors: float
    errors: float
    scale_min: float
    scale_max: float

    @property
    def relative_rms(self) -> float:
        """sqrt(Σ (q − w)² / Σ w²); 0 where every weight is 0."""
        return math.sqrt(self.squared_errors / self.squares) if self.squares else 0.0

    @property
    def bias(self) -> float:
        """Σ (q − w) / Σ |w|: the share of the weights' size by which the base leans to one side.

        0 where every weight is 0. A base without bias has about ± relative_rms / sqrt(count).
        """
        return self.errors / self.magnitudes if self.magnitudes else 0.0

    @property
    def mean_error(self) -> float:
        """Mean of q − w, in units of the weights."""
        return self.errors / self.count if self.count else 0.0

    @property
    def zero_fraction(self) -> float:
        return self.zeros / self.count if self.count else 0.0

    def to_json(self) -> dict[str, Any]:
        """Values for JSON: the sums, and beside them the figures derived from them.

        scale_min and scale_max are None where there is no scale.
        """
        sums = asdict(self) | {"codes": list(self.codes)}
        if self.scale_max == 0:
            sums |= {"scale_min": None, "scale_max": None}
        return sums | {
            "relative_rms": self.relative_rms,
            "bias": self.bias,
            "mean_error": self.mean_error,
            "zero_fraction": self.zero_fraction,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> MatrixStatistics:
        """The inverse of `to_json`, from its sums; exact."""
        sums = {field.name: values[field.name] for field in fields(cls)}
        if sums["scale_max"] is None:
            sums |= {"scale_min": math.inf, "scale_max": 0.0}
        return cls(**(sums | {"codes": tuple(sums["codes"])}))


def merge_statistics(parts: Iterable[MatrixStatistics]) -> MatrixStatistics:
    """The statistics of all the matrices' weights together.

    The float sums are rounded once (`math.fsum`), so the order of the matrices does not matter.
    """
    given = list(parts)
    histogram = [sum(counts) for counts in zip(*(part.codes for part in given), strict=True)]
    plus_one, plus_four, minus_one, minus_four = histogram or [0, 0, 0, 0]
    return MatrixStatistics(
        count=sum(part.count for part in given),
        zeros=sum(part.zeros for part in given),
        negative_zeros=sum(part.negative_zeros for part in given),
        codes=(plus_one, plus_four, minus_one, minus_four),
        squares=math.fsum(part.squares for part in given),
        magnitudes=math.fsum(part.magnitudes for part in given),
        squared_errors=math.fsum(part.squared_errors for part in given),
        errors=math.fsum(part.errors for part in given),
        scale_min=min((part.scale_min for part in given), default=math.inf),
        scale_max=max((part.scale_max for part in given), default=0.0),
    )


def matrix_statistics(weight: NDArray[np.float32], base: TwoBitMatrix) -> MatrixStatistics:
    """The statistics of `base` as a stand-in for `weight`, float32 [N, K], which it came from."""
    require_blocks(weight)
    if base.codes.shape != weight.shape:
        raise ValueError(f"a base of {base.codes.shape} does not belong to {weight.shape} weights")
    sums = np.empty((weight.shape[0], 4))
    counts = np.zeros(6, np.int64)
    scale_values = E4M3_VALUES * base.factor
    _sum(weight, base.codes, base.scales, scale_values, sums, counts)
    used = scale_values[np.unique(base.scales[base.scales != 0])]
    return from_sums(weight.size, counts, sums, used)


def from_sums(
    count: int, counts: NDArray[np.int64], sums: NDArray[np.float64], used: NDArray[np.float64]
) -> MatrixStatistics:
    """Of a matrix of `count` weights.

    Args:
        counts: weights of each of the four codes, zeros, zeros with a minus, [6]. sums: of each row
            of weights the squares, magnitudes, squared errors and errors, [N, 4]. used: the scales
            in use that are not zero.
    """
    *codes, zeros, negative_zeros = counts.tolist()
    squares, magnitudes, squared_errors, errors = map(math.fsum, sums.T.tolist())
    return MatrixStatistics(
        count=count,
        zeros=zeros,
        negative_zeros=negative_zeros,
        codes=(codes[0], codes[1], codes[2], codes[3]),
        squares=squares,
        magnitudes=magnitudes,
        squared_errors=squared_errors,
        errors=errors,
        scale_min=float(used.min(initial=math.inf)),
        scale_max=float(used.max(initial=0.0)),
    )


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _sum(
    weight: NDArray[np.float32],
    codes: NDArray[np.uint8],
    scales: NDArray[np.uint8],
    scale_values: NDArray[np.float64],
    sums: NDArray[np.float64],
    counts: NDArray[np.int64],
) -> None:
    # One float sum a lane, and the lanes of a row as a tree: vectors, and GPUs, without a change in
    # the order of additions.
    lanes = np.empty((4, BLOCK))
    for n in range(weight.shape[0]):
        lanes[:] = 0
        for b in range(scales.shape[1]):
            scale = scale_values[scales[n, b]]
            big, negative, both, zeros, negative_zeros = 0, 0, 0, 0, 0
            for i in range(BLOCK):
                w = np.float64(weight[n, b * BLOCK + i])
                code = codes[n, b * BLOCK + i]
                level = (1 + 3 * (code & 1)) * (1 - (code & 2))
                error = level * scale - w
                lanes[0, i] += w * w
                lanes[1, i] += abs(w)
                lanes[2, i] += error * error
                lanes[3, i] += error
                big += code & 1
                negative += code >> 1
                both += (code >> 1) & (code & 1)
                zeros += w == 0
                negative_zeros += (w == 0) & (code >> 1)
            counts[0] += BLOCK - big - negative + both
            counts[1] += big - both
            counts[2] += negative - both
            counts[3] += both
            counts[4] += zeros
            counts[5] += negative_zeros
        half = BLOCK // 2
        while half:
            for i in range(half):
                for s in range(4):
                    lanes[s, i] += lanes[s, i + half]
            half //= 2
        for s in range(4):
            sums[n, s] = lanes[s, 0]
