"""Writing one layer's file: rows in any order, as workers finish them, then all the rest."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import BinaryIO

import numpy as np

from moet.checkpoints.base import PROJECTIONS
from moet.checkpoints.reader import Checkpoint
from moet.formats.base import FORMATS
from moet.formats.layout import Precision
from moet.pack.encode import ExpertEncoder, encode_expert
from moet.pack.files import U8, begin_writeback, sync_directory, write_exact, writing
from moet.pack.layer import Arrays, LayerLayout, layer_file_name, slice_digests
from moet.pack.manifest import Fp4, LayerEntry, Recipe, Source
from moet.pack.statistics import layer_statistics
from moet.quantize.base import BaseQuantizer
from moet.quantize.statistics import MatrixStatistics


class LayerWriter:
    """Writes the file of one layer: rows in any order, then the small tensors and the header.

    `write_expert` may be called by several threads; the others by one, after all experts.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        quantizer: BaseQuantizer,
        layout: LayerLayout,
        recipe: Recipe,
        directory: Path,
        encoder: ExpertEncoder | None = None,
    ) -> None:
        self._encoder = encoder
        self._checkpoint, self._quantizer, self._layout = checkpoint, quantizer, layout
        self._path = directory / layer_file_name(layout.layer)
        self._temporary = self._path.with_name(self._path.name + ".tmp")
        self._arrays: Arrays = layout.empty_tail()
        self._files = {file.name: number for number, file in enumerate(recipe.model.files)}
        self._statistics: dict[int, list[MatrixStatistics]] = {}
        self._opening = threading.Lock()
        self._file: BinaryIO | None = None

    @property
    def complete(self) -> bool:
        """Whether every expert is written."""
        return len(self._statistics) == self._layout.experts

    def write_expert(self, expert: int) -> tuple[int, int]:
        """Encodes an expert and writes its rows; returns the bytes read and written."""
        layout, arrays = self._layout, self._arrays
        done, source_digest = encode_expert(
            self._checkpoint, self._quantizer, layout, expert, self._encoder
        )
        arrays["base_factor"][expert] = done.base_factor
        arrays["base_blake3"][expert] = slice_digests(layout.base, done.base)
        arrays["fp4_factor"][expert] = done.fp4_factor
        fd, written = self._open(), done.base.nbytes
        with writing(self._path):
            self._write_row(fd, done.base, Precision.BASE, expert)
            if done.fp4 is not None:
                arrays["fp4_blake3"][expert] = slice_digests(layout.fp4, done.fp4)
                self._write_row(fd, done.fp4, layout.fp4.precision, expert)
                written += done.fp4.nbytes
        if source_digest is not None:
            arrays["fp4_index"][expert] = self._index(expert)
            arrays["fp4_source_blake3"][expert] = np.frombuffer(source_digest, np.uint8)
        self._statistics[expert] = done.statistics
        return self._checkpoint.expert_bytes(layout.layer), written

    def finish(self, fp4: Fp4) -> tuple[LayerEntry, int]:
        """Makes the file durable, and describes it; returns also the bytes written."""
        layout, fd = self._layout, self._open()
        tail = layout.join_tail(self._arrays)
        try:
            with writing(self._path):
                write_exact(fd, tail, layout.tail_start)
                write_exact(fd, layout.header, 0)
                os.fsync(fd)
                self._temporary.replace(self._path)
                sync_directory(self._path.parent)
        finally:
            self.close()
        entry = LayerEntry(
            layer=layout.layer,
            file=self._path.name,
            file_bytes=layout.file_bytes,
            blake3=layout.tail_digest(tail),
            fp4=fp4,
            source=Source(
                format=self._checkpoint.expert_format(layout.layer),
                bytes=self._checkpoint.expert_bytes(layout.layer) * layout.experts,
            ),
            statistics=layer_statistics([self._statistics[e] for e in range(layout.experts)]),
        )
        return entry, len(tail) + len(layout.header)

    def close(self) -> None:
        """Closes the file, whether or not it is complete."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> int:
        """The file's descriptor; made by the first row, so that a layer begun is a file open."""
        with self._opening:
            if self._file is None:
                with writing(self._path):
                    self._file = self._temporary.open("wb", buffering=0)
            return self._file.fileno()

    def _write_row(self, fd: int, row: U8, precision: Precision, expert: int) -> None:
        offset = self._layout.row_offset(precision, expert)
        write_exact(fd, row, offset)
        begin_writeback(fd, offset, row.nbytes)

    def _index(self, expert: int) -> list[list[tuple[int, int, int]]]:
        """(file number, offset, bytes) of each part of gate, up and down."""
        layer = self._layout.layer
        located = self._checkpoint.locate(layer, expert)
        names = FORMATS[self._checkpoint.expert_format(layer)].parts
        return [
            [
                (self._files[ref.file], ref.offset, ref.nbytes)
                for ref in (located[projection][name] for name in names)
            ]
            for projection in PROJECTIONS
        ]
