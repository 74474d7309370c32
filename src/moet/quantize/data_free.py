"""Level 0: the 2-bit base of least squared weight error, no data needed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moet.errors import CheckpointError
from moet.formats.numbers import E4M3_VALUES
from moet.quantize.base import (
    QUANTIZERS,
    SCALE_MAX_BYTE,
    BaseQuantizer,
    MatrixContext,
    TwoBitMatrix,
    require_blocks,
)
from moet.quantize.search import largest_magnitude, search_blocks

_LARGEST_SCALE = float(E4M3_VALUES[SCALE_MAX_BYTE])
_INFINITY_BITS = 0x7F800000
_SMALLEST_NORMAL = float(np.finfo(np.float32).tiny)


@QUANTIZERS.register("data-free")
class DataFreeQuantizer(BaseQuantizer):
    """Codes and scale of every block chosen together, for the least squared error (`search`).

    The factor is max|w| / 112. No block can need a scale above its own max|w| (a flat block needs
    just that), so 112, the largest scale allowed, always suffices; and every block whose scale is
    above 2^-6 / 112 = 1/7168 of max|w| gets it as a normal E4M3 number, at full precision. Weights
    in blocks that are smaller than that are zero for all practical purposes beside the largest.
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
        factor = _factor(float(np.array(bits, np.int32).view(np.float32)))
        codes, scales = search_blocks(weight, factor)
        return TwoBitMatrix(codes, scales, factor)


def _factor(largest: float) -> float:
    """largest / 112 as a float32 number; 1 for a matrix of zeros."""
    if largest == 0:
        return 1.0
    return max(float(np.float32(largest / _LARGEST_SCALE)), _SMALLEST_NORMAL)
