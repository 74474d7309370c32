"""One expert of a checkpoint, read, decoded, quantized and brought to its rows' bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray

from moet.checkpoints.base import PROJECTIONS, ExpertSource, ExpertWeights, MatrixSource
from moet.checkpoints.reader import Checkpoint
from moet.formats.base import FORMATS
from moet.formats.fp4 import fp4_matrix
from moet.formats.layout import Matrix, Precision, RowLayout, encode_row
from moet.pack.files import U8
from moet.pack.layer import LayerLayout
from moet.quantize.base import BaseQuantizer, Expert
from moet.quantize.statistics import MatrixStatistics, matrix_statistics

FP4_RULE = "least_error"  # how our own MXFP4 chooses scales, where the checkpoint has no FP4


@dataclass(frozen=True)
class EncodedRows:
    """An expert's rows, and what its layer's small tensors hold of them.

    base, fp4: whole rows, until the same thread encodes another expert; fp4 is None where it stays
    in the checkpoint. factors: float32 [3]. statistics: of gate, up and down.
    """

    base: U8
    base_factor: NDArray[np.float32]
    fp4: U8 | None
    fp4_factor: NDArray[np.float32]
    statistics: list[MatrixStatistics]


class RowEncoder(ABC):
    """Makes the rows of level 0, to the same bits as this module with `DataFreeQuantizer` does."""

    @abstractmethod
    def encode(self, source: ExpertSource, layout: LayerLayout) -> EncodedRows | None:
        """None for an expert that this module should encode, or say why it cannot; thread-safe."""


ExpertEncoder = Callable[[ExpertSource, LayerLayout, int], EncodedRows | None]


def encode_expert(
    checkpoint: Checkpoint,
    quantizer: BaseQuantizer,
    layout: LayerLayout,
    expert: int,
    encoder: ExpertEncoder | None = None,
) -> tuple[EncodedRows, bytes | None]:
    """Reads and encodes one expert of `layout.layer`; thread-safe.

    Returns also, where its FP4 stays in the checkpoint, the BLAKE3 of the checkpoint's bytes.
    encoder: asked first; the quantizer takes the experts that it refuses.
    Raises CheckpointError naming the tensor that cannot be read or decoded.
    """
    source = checkpoint.read_expert(layout.layer, expert)
    digest = None if layout.fp4_in_pack else _source_digest(source)
    rows = None if encoder is None else encoder(source, layout, expert)
    return rows or encode_rows(checkpoint, quantizer, layout, expert, source), digest


def encode_rows(
    checkpoint: Checkpoint,
    quantizer: BaseQuantizer,
    layout: LayerLayout,
    expert: int,
    source: ExpertSource,
) -> EncodedRows:
    """The rows of an expert that was read, on the CPU; raises as `encode_expert` does."""
    weights = checkpoint.decode_expert(layout.layer, expert, source)
    values = Expert(*(weight.numpy() for weight in weights))
    quantized = quantizer.quantize_expert(values, layout.layer, expert)

    fp4 = None
    if layout.fp4_in_pack:
        matrices, fp4_factor = _fp4(layout.fp4.precision, source, weights)
        fp4 = _row(layout.fp4, matrices)
    else:
        fp4_factor = [_stored_factor(source[projection]) for projection in PROJECTIONS]
    return EncodedRows(
        base=_row(layout.base, [matrix.matrix() for matrix in quantized]),
        base_factor=np.array([matrix.factor for matrix in quantized], np.float32),
        fp4=fp4,
        fp4_factor=np.array(fp4_factor, np.float32),
        statistics=[*map(matrix_statistics, values, quantized)],
    )


def _fp4(
    precision: Precision, source: ExpertSource, weights: ExpertWeights
) -> tuple[list[Matrix], list[float]]:
    """gate, up and down at `precision`, and their factors: the source's own, else encoded."""
    if source.gate.format == precision:
        found = [fp4_matrix(precision, source[projection].parts) for projection in PROJECTIONS]
    else:
        encode = FORMATS[precision].encode
        found = [fp4_matrix(precision, encode(weight, FP4_RULE)) for weight in weights]
    return [matrix for matrix, _ in found], [factor for _, factor in found]


def _stored_factor(matrix: MatrixSource) -> float:
    """The float32 factor of an FP4 matrix; decoding has checked it."""
    factor = matrix.parts.get("global_scale")
    return 1.0 if factor is None else float(factor)


def _row(layout: RowLayout, matrices: list[Matrix]) -> U8:
    row = np.empty(layout.row_bytes, np.uint8)
    gate, up, down = matrices
    encode_row(layout, gate, up, down, row)
    return row


def _source_digest(source: ExpertSource) -> bytes:
    """BLAKE3 of the parts' bytes as stored, in the order of the layer file's index."""
    hasher = blake3()
    for projection in PROJECTIONS:
        matrix = source[projection]
        for name in FORMATS[matrix.format].parts:
            hasher.update(
                matrix.parts[name].contiguous().reshape(-1).view(torch.uint8).numpy().data
            )
    return hasher.digest()
