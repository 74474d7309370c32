"""A layer file: a safetensors file whose rows start on 4096-byte offsets.

The data section holds `base`, U8 [experts, row_bytes], first; then `fp4` likewise where the pack
stores FP4 rows itself; then the small tensors that the rows are checked and scaled with:

    fp4_index          I64 [experts, 3, parts, 3]  file number, absolute offset, bytes of each part
                       of gate, up, down in the checkpoint's own files
    base_factor        F32 [experts, 3]            factors of gate, up, down
    fp4_factor         F32 [experts, 3]
    base_blake3        U8 [experts, slices, 32]    of each slice; the last one's covers the padding
    fp4_blake3         U8 [experts, slices, 32]    of the pack's own FP4 rows
    fp4_source_blake3  U8 [experts, 32]            of the checkpoint's bytes, in the index's order

`fp4_index` and `fp4_source_blake3` exist where FP4 stays in the checkpoint, `fp4` and `fp4_blake3`
where the pack has it. The whole header follows from the geometry, so a reader compares, it never
parses: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from moet.checkpoints.base import PROJECTIONS
from moet.formats.layout import ROW_ALIGN, Precision, RowLayout

DIGEST_BYTES = 32
DTYPES: dict[str, np.dtype[Any]] = {
    "U8": np.dtype("u1"),
    "F32": np.dtype("<f4"),
    "I64": np.dtype("<i8"),
}

Arrays = dict[str, NDArray[Any]]


class TensorPlace(NamedTuple):
    """One tensor of a layer file; `start` and `stop` count from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def layer_file_name(layer: int) -> str:
    """The only name that the file of `layer` can have."""
    return f"layer-{layer:05d}.safetensors"


@dataclass(frozen=True)
class LayerLayout:
    """Where everything is in the file of one layer.

    base, fp4: the layouts of the whole rows (all slices). fp4_parts: the parts of one matrix in
    the checkpoint's FP4 format, or 0 where the pack stores the FP4 rows itself.
    """

    layer: int
    experts: int
    base: RowLayout
    fp4: RowLayout
    fp4_parts: int

    @property
    def fp4_in_pack(self) -> bool:
        return self.fp4_parts == 0

    @cached_property
    def _shapes(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        experts, slices, matrices = self.experts, self.base.slices, len(PROJECTIONS)
        shapes: dict[str, tuple[str, tuple[int, ...]]] = {
            "base": ("U8", (experts, self.base.row_bytes))
        }
        if self.fp4_in_pack:
            shapes["fp4"] = ("U8", (experts, self.fp4.row_bytes))
        else:
            shapes["fp4_index"] = ("I64", (experts, matrices, self.fp4_parts, 3))
        shapes["base_factor"] = ("F32", (experts, matrices))
        shapes["fp4_factor"] = ("F32", (experts, matrices))
        shapes["base_blake3"] = ("U8", (experts, slices, DIGEST_BYTES))
        if self.fp4_in_pack:
            shapes["fp4_blake3"] = ("U8", (experts, slices, DIGEST_BYTES))
        else:
            shapes["fp4_source_blake3"] = ("U8", (experts, DIGEST_BYTES))
        return shapes

    @cached_property
    def header(self) -> bytes:
        """The file's first bytes: length and JSON, padded so that the rows begin aligned."""
        entries: dict[str, object] = {
            "__metadata__": {"format": "moet-pack", "layer": str(self.layer)}
        }
        start = 0
        for name, (dtype, shape) in self._shapes.items():
            stop = start + DTYPES[dtype].itemsize * math.prod(shape)
            entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}
            start = stop
        text = json.dumps(entries, separators=(",", ":")).encode()
        length = -(-(8 + len(text)) // ROW_ALIGN) * ROW_ALIGN - 8
        return length.to_bytes(8, "little") + text.ljust(length)

    @cached_property
    def tensors(self) -> dict[str, TensorPlace]:
        """All tensors, in the order of their bytes."""
        places, start = {}, len(self.header)
        for name, (dtype, shape) in self._shapes.items():
            stop = start + DTYPES[dtype].itemsize * math.prod(shape)
            places[name] = TensorPlace(dtype, shape, start, stop)
            start = stop
        return places

    @property
    def row_tensors(self) -> tuple[str, ...]:
        """The tensors that hold rows."""
        return ("base", "fp4") if self.fp4_in_pack else ("base",)

    @property
    def tail_start(self) -> int:
        """Where the rows end and the small tensors begin."""
        return self.tensors[self.row_tensors[-1]].stop

    @property
    def file_bytes(self) -> int:
        return next(reversed(self.tensors.values())).stop

    def rows(self, precision: Precision) -> tuple[str, RowLayout]:
        """The name of the tensor of `precision`'s rows in this file, and their layout."""
        return ("base", self.base) if precision is Precision.BASE else ("fp4", self.fp4)

    def row_offset(self, precision: Precision, expert: int) -> int:
        """The file offset of a row; a multiple of 4096."""
        name, layout = self.rows(precision)
        return self.tensors[name].start + expert * layout.row_bytes

    def empty_tail(self) -> Arrays:
        """The small tensors, zero, for a writer to fill."""
        return {
            name: np.zeros(place.shape, DTYPES[place.dtype])
            for name, place in self.tensors.items()
            if name not in self.row_tensors
        }

    def join_tail(self, arrays: Arrays) -> bytes:
        """The small tensors as the file's last bytes."""
        return b"".join(
            np.ascontiguousarray(arrays[name]).tobytes()
            for name in self.tensors
            if name not in self.row_tensors
        )

    def split_tail(self, tail: bytes) -> Arrays:
        """The inverse of `join_tail`; `tail` has the right length."""
        return {
            name: np.frombuffer(tail, DTYPES[place.dtype], math.prod(place.shape), begin).reshape(
                place.shape
            )
            for name, place in self.tensors.items()
            if (begin := place.start - self.tail_start) >= 0
        }

    def tail_digest(self, tail: bytes) -> str:
        """BLAKE3, in hex, of everything in the file but the rows."""
        hasher = blake3(self.header)
        hasher.update(tail)
        return hasher.hexdigest()


def slice_digests(layout: RowLayout, row: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """BLAKE3 of each slice of a whole row, uint8 [slices, 32]; the last includes the padding."""
    digests = np.empty((layout.slices, DIGEST_BYTES), np.uint8)
    for index in range(layout.slices):
        last = index + 1 == layout.slices
        stop = layout.row_bytes if last else (index + 1) * layout.slice_bytes
        digest = blake3(row[index * layout.slice_bytes : stop].data).digest()
        digests[index] = np.frombuffer(digest, np.uint8)
    return digests
