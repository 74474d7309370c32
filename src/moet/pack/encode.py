"""One expert of a checkpoint, read, decoded, quantized and brought to its rows' bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray

from moet.checkpoints.base import PROJECTIONS, ExpertSource, ExpertWeights, MatrixSource
from moet.checkpoints.reader import Checkpoint
from moet.errors import PackError
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


def encode_expert(
    checkpoint: Checkpoint,
    quantizer: BaseQuantizer,
    layout: LayerLayout,
    expert: int,
    encoder: RowEncoder | None = None,
) -> tuple[EncodedRows, bytes | None]:
    """Reads and encodes one expert of `layout.layer`; thread-safe.

    Returns also, where its FP4 stays in the checkpoint, the BLAKE3 of the checkpoint's bytes.
    What an encoder makes of a layer's first expert is compared with what the quantizer does.
    Raises CheckpointError naming the tensor that cannot be read or decoded, PackError for an
    encoder that is wrong.
    """
    source = checkpoint.read_expert(layout.layer, expert)
    digest = None if layout.fp4_in_pack else _source_digest(source)
    rows = None if encoder is None else encoder.encode(source, layout)
    if rows is None:
        return _encode(checkpoint, quantizer, layout, expert, source), digest
    if expert == 0:
        _compare(rows, _encode(checkpoint, quantizer, layout, expert, source), layout)
    return rows, digest


def _compare(found: EncodedRows, expected: EncodedRows, layout: LayerLayout) -> None:
    """Raises PackError where an encoder's rows of a layer's first expert are not the quantizer's:
    drivers, compilers and other GPUs than ours may have errors that no test of ours has met."""
    nothing = np.empty(0)
    pairs: dict[str, tuple[NDArray[Any] | None, NDArray[Any] | None]] = {
        "base row": (found.base, expected.base),
        "base factors": (found.base_factor, expected.base_factor),
        "FP4 row": (found.fp4, expected.fp4),
        "FP4 factors": (found.fp4_factor, expected.fp4_factor),
    }
    wrong = [
        name
        for name, (one, other) in pairs.items()
        if not np.array_equal(nothing if one is None else one, nothing if other is None else other)
    ]
    if found.statistics != expected.statistics:
        wrong.append("statistics")
    if wrong:
        raise PackError(
            f"layer {layout.layer}, expert 0: the GPU's {' and '.join(wrong)} differ from the "
            "CPU's.",
            "Pack with --device cpu, and report this.",
        )


def _encode(
    checkpoint: Checkpoint,
    quantizer: BaseQuantizer,
    layout: LayerLayout,
    expert: int,
    source: ExpertSource,
) -> EncodedRows:
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
