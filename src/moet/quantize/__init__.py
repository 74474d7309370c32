"""The 2-bit base of an expert matrix: quantizers by level of effort, and statistics.

Importing this package registers the quantizers in `QUANTIZERS`.
"""

from moet.quantize.base import (
    BLOCK,
    QUANTIZERS,
    BaseQuantizer,
    Expert,
    MatrixContext,
    TwoBitExpert,
    TwoBitMatrix,
)
from moet.quantize.calibrated import (
    CalibratedQuantizer,
    GptqQuantizer,
    ScalesQuantizer,
    SequentialQuantizer,
)
from moet.quantize.data_free import DataFreeQuantizer
from moet.quantize.samples import LayerSamples, SampleSource
from moet.quantize.statistics import MatrixStatistics, matrix_statistics, merge_statistics

__all__ = [
    "BLOCK",
    "QUANTIZERS",
    "BaseQuantizer",
    "CalibratedQuantizer",
    "DataFreeQuantizer",
    "Expert",
    "GptqQuantizer",
    "LayerSamples",
    "MatrixContext",
    "MatrixStatistics",
    "SampleSource",
    "ScalesQuantizer",
    "SequentialQuantizer",
    "TwoBitExpert",
    "TwoBitMatrix",
    "matrix_statistics",
    "merge_statistics",
]
