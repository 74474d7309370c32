"""Numbers, block formats of checkpoints, and the bytes of a row.

Importing this package registers the formats in `FORMATS`.
"""

from moet.formats.base import FORMATS, BlockFormat, Parts
from moet.formats.bf16 import BF16
from moet.formats.fp4 import fp4_matrix
from moet.formats.fp8_block import FP8Block
from moet.formats.int4_group import INT4Group
from moet.formats.layout import (
    Matrix,
    Precision,
    RowLayout,
    decode_row,
    encode_row,
    max_slices,
)
from moet.formats.matrices import decode_matrix
from moet.formats.mxfp4 import MXFP4
from moet.formats.nvfp4 import NVFP4

__all__ = [
    "BF16",
    "FORMATS",
    "MXFP4",
    "NVFP4",
    "BlockFormat",
    "FP8Block",
    "INT4Group",
    "Matrix",
    "Parts",
    "Precision",
    "RowLayout",
    "decode_matrix",
    "decode_row",
    "encode_row",
    "fp4_matrix",
    "max_slices",
]
