"""The 2-bit base of an expert matrix: quantizers by level of effort, and statistics.

Importing this package registers the quantizers in `QUANTIZERS`.
"""

from moet.quantize.base import (
    BLOCK,
    QUANTIZERS,
    SCALE_MAX_BYTE,
    SCALE_MIN_BYTE,
    BaseQuantizer,
    MatrixContext,
    TwoBitMatrix,
)
from moet.quantize.data_free import DataFreeQuantizer
from moet.quantize.statistics import MatrixStatistics, matrix_statistics, merge_statistics

__all__ = [
    "BLOCK",
    "QUANTIZERS",
    "SCALE_MAX_BYTE",
    "SCALE_MIN_BYTE",
    "BaseQuantizer",
    "DataFreeQuantizer",
    "MatrixContext",
    "MatrixStatistics",
    "TwoBitMatrix",
    "matrix_statistics",
    "merge_statistics",
]
