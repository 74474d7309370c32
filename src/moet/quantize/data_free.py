"""Level 0: the 2-bit base of least squared weight error, no data needed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moet.errors import CheckpointError
from moet.quantize.base import (
    QUANTIZERS,
    MatrixContext,
    MatrixQuantizer,
    TwoBitMatrix,
    require_blocks,
)
from moet.quantize.search import largest_magnitude, search_blocks

_STEPS = 256  # max|w| in units of the factor
_INFINITY_BITS = 0x7F800000
_SMALLEST_NORMAL = float(np.finfo(np.float32).tiny)


@QUANTIZERS.register("data-free")
class DataFreeQuantizer(MatrixQuantizer):
    """Codes and scale of every block chosen together, for the least squared error (`search`).

    The factor is max|w| / 256. No block needs a scale of 0.4 of its own max|w| or more (`search`),
    which is 102.4 here and within 112, the largest allowed. A larger factor would only push small
    blocks below 2^-6, where E4M3 loses precision and ×4 its exactness: with this one, every block
    whose scale is above max|w| / 16384 gets it in full. And a power of two makes the factor exact,
    and a matrix of ±max|w| too.
    """

    name = "data-free"
    level = 0

    def quantize(self, weight: NDArray[np.float32], context: MatrixContext) -> TwoBitMatrix:
        """Raises CheckpointError when a weight is NaN or infinite."""
        require_blocks(weight)
        weight = np.ascontiguousarray(weight)
        bits = largest_magnitude(weight.view(np.int32))
        if bits >= _INFINITY_BITS:
            raise CheckpointError(f"{context} has a weight that is not finite.")
        factor = matrix_factor(bits)
        codes, scales = search_blocks(weight, factor)
        return TwoBitMatrix(codes, scales, factor)


def matrix_factor(bits: int) -> float:
    """The factor, a float32 number, of a matrix with max|w| given as a float32's bits."""
    largest = float(np.array(bits, np.int32).view(np.float32))
    return max(largest / _STEPS, _SMALLEST_NORMAL) if largest else 1.0
