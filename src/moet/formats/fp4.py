"""FP4 checkpoints as recovery rows: the stored codes and scales, not one bit changed."""

from __future__ import annotations

from moet.errors import UnsupportedError
from moet.formats.base import FORMATS, Parts
from moet.formats.layout import Matrix
from moet.formats.mxfp4 import MXFP4
from moet.formats.nvfp4 import NVFP4


def fp4_matrix(format: str, parts: Parts) -> tuple[Matrix, float]:
    """The matrix as nibble codes [N, K] and scale bytes [N, K/block], and its float32 factor.

    `format` is "mxfp4" (factor 1) or "nvfp4" (factor `global_scale`). The precision of the same
    name decodes it: `decode_matrix(Precision(format), *fp4_matrix(format, parts))`.

    Raises CheckpointError as the format's `decode` does, ConfigError for an unknown format, and
    UnsupportedError for one that is not FP4.
    """
    match FORMATS[format]:
        case MXFP4() as mxfp4:
            return mxfp4.matrix(parts), 1.0
        case NVFP4() as nvfp4:
            return nvfp4.matrix(parts)
        case other:
            raise UnsupportedError(
                f"{other.name} is not an FP4 format.",
                "Encode the matrix as mxfp4 first.",
            )
