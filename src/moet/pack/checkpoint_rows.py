"""FP4 rows that stay in the checkpoint: its own bytes, verified, brought to kernel order."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import NamedTuple

import numpy as np
from blake3 import blake3

from moet.checkpoints.base import PROJECTIONS
from moet.checkpoints.reader import Checkpoint
from moet.errors import CheckpointError, PackError
from moet.formats.base import FORMATS
from moet.formats.layout import RowLayout
from moet.pack.files import REMAKE, U8, StorageFile
from moet.pack.kernel_order import PackedMatrix, encode_packed_row
from moet.pack.reader import Pack
from moet.pack.source import RowKey

GAP = 4096  # parts of an expert that lie closer than this are read in one go
ALIGN = 64  # of each part in the thread's buffer
INTACT = "Download this file of the checkpoint again, and pack it again if it is not damaged."


class Part(NamedTuple):
    """How one part of one matrix is stored, and its place in the thread's buffer.

    rows: which rows of what is stored are the matrix's; None for all. In a stack's block are those
    of gate and up, and the place of the second is that of the first: it is read once.
    """

    projection: int
    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    rows: slice | None

    def find(self, buffer: U8) -> U8:
        """The part's bytes as stored, [rows, bytes a row]; a factor's are [1, 4]."""
        found = buffer[self.start : self.stop].reshape(self.shape[0] if self.shape else 1, -1)
        return found if self.rows is None else found[self.rows]


class CheckpointRows:
    """Reads FP4 experts through the pack's index; a context manager that owns open files.

    Raises CheckpointError when a file of the checkpoint is gone, PackError for an index that does
    not fit the checkpoint.
    """

    def __init__(
        self, pack: Pack, checkpoint: Checkpoint, *, direct: bool = False, verify: bool = True
    ) -> None:
        self._pack, self._verify = pack, verify
        self._scratch = threading.local()
        self._gap = np.empty(GAP, np.uint8)
        self._parts = {
            index: _parts(checkpoint, index)
            for index, layer in pack.layers.items()
            if not layer.layout.fp4_in_pack
        }
        for index, parts in self._parts.items():
            sizes = pack.layers[index].arrays["fp4_index"][..., 2].reshape(-1, len(parts))
            if (sizes != [part.stop - part.start for part in parts]).any():
                raise PackError(
                    f"{pack.layers[index].path}: fp4_index does not fit the checkpoint.", REMAKE
                )
        with ExitStack() as stack:
            self._files = [
                stack.enter_context(
                    StorageFile(
                        checkpoint.path / file.name, CheckpointError, follow=True, direct=direct
                    )
                )
                for file in pack.manifest.model.files
            ]
            self._open_files = stack.pop_all()

    def __enter__(self) -> CheckpointRows:
        return self

    def __exit__(self, *error: object) -> None:
        self._open_files.close()

    def read(self, key: RowKey, local: RowLayout, rank: int, out: U8) -> int:
        """Reads an expert and encodes slices [rank · local.slices, …) of it into `out`.

        The whole expert is read at every rank: the checkpoint's bytes have one checksum, and the
        down projection is cut along its columns. Returns the bytes read from storage.
        """
        buffer, done = self._load(key)
        gate, up, down = (_packed(self._parts[key.layer], buffer, number) for number in range(3))
        encode_packed_row(local, rank * local.slices, gate, up, down, out[: local.row_bytes])
        return done

    def check(self, key: RowKey) -> int:
        """Reads an expert and checks it; raises CheckpointError. Returns the bytes read."""
        return self._load(key)[1]

    def files_of(self, key: RowKey) -> str:
        """The checkpoint's files that hold an expert, separated by commas."""
        numbers = np.unique(self._pack.layers[key.layer].arrays["fp4_index"][key.expert, ..., 0])
        return ", ".join(str(self._files[number].path) for number in numbers)

    def _load(self, key: RowKey) -> tuple[U8, int]:
        """The expert's parts in the thread's buffer, and the bytes read."""
        layer, parts = self._pack.layers[key.layer], self._parts[key.layer]
        buffer = self._buffer(max(part.stop for part in parts))
        index = layer.arrays["fp4_index"][key.expert].reshape(-1, 3)
        places = {
            part.start: (int(row[0]), int(row[1]), part)
            for row, part in zip(index, parts, strict=True)
        }
        done = self._read_runs(key, sorted(places.values(), key=lambda of: of[:2]), buffer)
        if self._verify:
            hasher = blake3()
            for part in parts:
                hasher.update(np.ascontiguousarray(part.find(buffer)).data)
            if hasher.digest() != layer.arrays["fp4_source_blake3"][key.expert].tobytes():
                raise CheckpointError(
                    f"{self.files_of(key)}: layer {key.layer} expert {key.expert}: the "
                    f"{key.precision} weights are not what they were at packing (their checksum "
                    f"fails).",
                    INTACT,
                )
        return buffer, done

    def _read_runs(self, key: RowKey, places: list[tuple[int, int, Part]], buffer: U8) -> int:
        """Reads parts that are neighbours in a file together. places: ascending."""
        done = position = 0
        while position < len(places):
            file, start, _ = places[position]
            end, buffers = start, []
            while position < len(places):
                other, offset, part = places[position]
                if other != file or not 0 <= offset - end <= GAP:
                    break
                if offset > end:
                    buffers.append(self._gap[: offset - end])
                buffers.append(buffer[part.start : part.stop])
                end = offset + part.stop - part.start
                position += 1
            try:
                done += self._files[file].read(buffers, start)
            except (OSError, EOFError) as error:
                raise CheckpointError(
                    f"{self._files[file].path}: layer {key.layer} expert {key.expert}: cannot be "
                    f"read ({error}).",
                    INTACT,
                ) from None
        return done

    def _buffer(self, size: int) -> U8:
        """The thread's own buffer, of at least `size` bytes."""
        buffer: U8 | None = getattr(self._scratch, "buffer", None)
        if buffer is None or buffer.nbytes < size:
            buffer = self._scratch.buffer = np.empty(size, np.uint8)
        return buffer


def _parts(checkpoint: Checkpoint, layer: int) -> list[Part]:
    """The parts of each expert of a layer, in the order in which they are hashed and indexed."""
    located, parts, end = checkpoint.locate(layer, 0), [], 0
    starts: dict[tuple[str, int], int] = {}
    for number, projection in enumerate(PROJECTIONS):
        rows = checkpoint.block_rows(layer, projection)
        for name in FORMATS[checkpoint.expert_format(layer)].parts:
            ref = located[projection][name]
            start = starts.setdefault((ref.file, ref.offset), -(-end // ALIGN) * ALIGN)
            end = max(end, start + ref.nbytes)
            parts.append(Part(number, name, ref.shape, start, start + ref.nbytes, rows))
    return parts


def _packed(parts: list[Part], buffer: U8, number: int) -> PackedMatrix:
    """The codes and scales of gate, up or down in the thread's buffer."""
    found = {part.name: part.find(buffer) for part in parts if part.projection == number}
    return PackedMatrix(found["codes"].view(np.uint32), found["scale"])
