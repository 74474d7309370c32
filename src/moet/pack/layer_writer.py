"""Writing one layer's file: rows in any order, as workers finish them, then all the rest."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from pathlib import Path

import numpy as np

from moet.checkpoints.base import PROJECTIONS
from moet.checkpoints.reader import Checkpoint
from moet.formats.base import FORMATS
from moet.formats.layout import Precision
from moet.pack.encode import encode_expert
from moet.pack.files import sync_directory, write_exact, writing
from moet.pack.layer import Arrays, LayerLayout, layer_file_name, slice_digests
from moet.pack.manifest import Fp4, LayerEntry, Recipe, Source
from moet.pack.progress import Progress
from moet.pack.statistics import layer_statistics
from moet.quantize.base import BaseQuantizer
from moet.quantize.statistics import MatrixStatistics


class LayerWriter:
    """Writes the file of one layer: rows in any order, then the small tensors and the header."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        quantizer: BaseQuantizer,
        layout: LayerLayout,
        recipe: Recipe,
        directory: Path,
    ) -> None:
        self._checkpoint, self._quantizer, self._layout = checkpoint, quantizer, layout
        self._path = directory / layer_file_name(layout.layer)
        self._arrays: Arrays = layout.empty_tail()
        self._files = {file.name: number for number, file in enumerate(recipe.model.files)}

    def write(self, pool: ThreadPoolExecutor, fp4: Fp4, progress: Progress) -> LayerEntry:
        """Writes, makes durable, and describes the layer."""
        layout = self._layout
        temporary = self._path.with_name(self._path.name + ".tmp")
        with writing(self._path), temporary.open("wb", buffering=0) as file:
            statistics = self._write_rows(pool, file.fileno(), progress)
            tail = layout.join_tail(self._arrays)
            write_exact(file.fileno(), tail, layout.tail_start)
            write_exact(file.fileno(), layout.header, 0)
            os.fsync(file.fileno())
            temporary.replace(self._path)
            sync_directory(self._path.parent)
        progress.advance(0, len(tail) + len(layout.header))
        return LayerEntry(
            layer=layout.layer,
            file=self._path.name,
            file_bytes=layout.file_bytes,
            blake3=layout.tail_digest(tail),
            fp4=fp4,
            source=Source(
                format=self._checkpoint.expert_format(layout.layer),
                bytes=self._checkpoint.expert_bytes(layout.layer) * layout.experts,
            ),
            statistics=layer_statistics(statistics),
        )

    def _write_rows(
        self, pool: ThreadPoolExecutor, fd: int, progress: Progress
    ) -> list[list[MatrixStatistics]]:
        """Writes every row into the open file `fd`; the statistics are in the experts' order."""
        layer, layout = self._layout.layer, self._layout
        read = self._checkpoint.expert_bytes(layer)
        written = layout.base.row_bytes + layout.fp4.row_bytes * layout.fp4_in_pack
        futures = {
            pool.submit(self._write_expert, fd, expert): expert
            for expert in self._checkpoint.read_order(layer)
        }
        statistics: dict[int, list[MatrixStatistics]] = {}
        try:
            for future in as_completed(futures):
                statistics[futures[future]] = future.result()
                progress.advance(read, written)
        finally:
            # After an error nobody may write to a descriptor that is about to be closed.
            for future in futures:
                future.cancel()
            wait(futures)
        return [statistics[expert] for expert in range(layout.experts)]

    def _write_expert(self, fd: int, expert: int) -> list[MatrixStatistics]:
        layout, arrays = self._layout, self._arrays
        done = encode_expert(self._checkpoint, self._quantizer, layout, expert)
        arrays["base_factor"][expert] = done.base_factor
        arrays["base_blake3"][expert] = slice_digests(layout.base, done.base)
        arrays["fp4_factor"][expert] = done.fp4_factor
        write_exact(fd, done.base, layout.row_offset(Precision.BASE, expert))
        if done.fp4 is not None:
            arrays["fp4_blake3"][expert] = slice_digests(layout.fp4, done.fp4)
            write_exact(fd, done.fp4, layout.row_offset(layout.fp4.precision, expert))
        if done.fp4_source is not None:
            arrays["fp4_index"][expert] = self._index(expert)
            arrays["fp4_source_blake3"][expert] = np.frombuffer(done.fp4_source, np.uint8)
        return done.statistics

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
