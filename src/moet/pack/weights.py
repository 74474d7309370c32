"""A row as the weights that a kernel computes with."""

from __future__ import annotations

import numpy as np
import torch

from moet.checkpoints import ExpertWeights
from moet.formats.layout import decode_row
from moet.formats.matrices import decode_matrix
from moet.pack.source import RowKey, RowSource


def read_weights(source: RowSource, key: RowKey) -> ExpertWeights:
    """The matrices, float32 on the CPU, of a row of `source`, which has whole rows.

    Raises what `source.read` raises.
    """
    layout = source.layouts[key.precision]
    row = np.empty(layout.row_bytes, np.uint8)
    source.read(key, row)
    factors = source.factors(key.layer, key.precision)[key.expert]
    return ExpertWeights(
        *(
            torch.from_numpy(decode_matrix(key.precision, matrix, float(factor)))
            for matrix, factor in zip(decode_row(layout, row), factors, strict=True)
        )
    )
