"""A calibration file's bytes: one safetensors file whose header follows from its metadata.

`tokens`, I32 [W, window], are the ids that were run, W windows of them. For every layer, with T
tokens in all, k experts that a token goes to, and E experts in a layer:

| tensor `layers.L.…` | dtype, shape | |
|---|---|---|
| `counts` | I64 [E] | tokens that went to each expert |
| `weight_sum`, `weight_square_sum` | F64 [E] | Σ and Σ² of their routing weights |
| `confidence` | I64 [20] | tokens by the share that the largest weight has in the sum |
| `stream_power` | F64 [W] | mean |h|² of the residual stream at the layer's entry, NaN if unseen |
| `blake3` | U8 [32] | of `second_moment`, `inputs`, `experts` and `weights` |
| `second_moment` | F32 [hidden, hidden] | Σ w x xᵀ / Σ w over tokens, w = Σ weight² |
| `inputs` | BF16 [T, hidden] | x, at the input of the routed experts |
| `experts`, `weights` | I32, F32 [T, k] | the routing |
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal

from pydantic import Field, model_validator

from moet.pack.manifest import Digest, Index, Model, Text, Width
from moet.pack.strict import Strict

CONFIDENCE_BINS = 20
DIGESTED = ("second_moment", "inputs", "experts", "weights")
DATA_ALIGN = 4096
METADATA_KEY = "moet"
_BYTES = {"U8": 1, "BF16": 2, "I32": 4, "F32": 4, "I64": 8, "F64": 8}

Count = Annotated[int, Field(gt=0, lt=2**31)]


class Metadata(Strict):
    """What a calibration is of. tokens: BLAKE3 of all token ids as little-endian int32.

    layers: the model's indices of the layers seen; draft layers are not among them.
    """

    schema_version: Literal[1]
    writer: Text
    model: Model
    hidden: Width
    experts: Annotated[int, Field(gt=0, le=2**13)]
    top_k: Annotated[int, Field(gt=0, le=2**13)]
    layers: tuple[Index, ...] = Field(min_length=1, max_length=1_000)
    windows: Count
    window: Count
    tokens: Digest

    @model_validator(mode="after")
    def _consistent(self) -> Metadata:
        if list(self.layers) != sorted(set(self.layers)):
            raise ValueError("layers are not ascending")
        return self

    @property
    def total(self) -> int:
        """Tokens in all."""
        return self.windows * self.window


@dataclass(frozen=True)
class Place:
    """A tensor in the file: dtype (safetensors' name), shape, absolute offset."""

    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        count = 1
        for extent in self.shape:
            count *= extent
        return count * _BYTES[self.dtype]

    @property
    def row_bytes(self) -> int:
        return self.nbytes // self.shape[0]


class CalibrationLayout:
    """Where everything of a calibration with this metadata is."""

    def __init__(self, metadata: Metadata) -> None:
        self.metadata = metadata

    @cached_property
    def header(self) -> bytes:
        """The file's first bytes, padded so that the data starts on a multiple of 4096."""
        table: dict[str, object] = {"__metadata__": {METADATA_KEY: self.metadata.model_dump_json()}}
        at = 0
        for name, dtype, shape in self._tensors():
            size = Place(dtype, shape, 0).nbytes
            table[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
            at += size
        text = json.dumps(table, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % DATA_ALIGN)
        return len(text).to_bytes(8, "little") + text

    @cached_property
    def _places(self) -> dict[str, Place]:
        places, at = {}, len(self.header)
        for name, dtype, shape in self._tensors():
            places[name] = Place(dtype, shape, at)
            at += places[name].nbytes
        return places

    @cached_property
    def file_bytes(self) -> int:
        return len(self.header) + sum(place.nbytes for place in self._places.values())

    @property
    def tokens(self) -> Place:
        """Where the token ids are."""
        return self._places["tokens"]

    def place(self, layer: int, name: str) -> Place:
        """Where a tensor of a layer is."""
        return self._places[f"layers.{layer}.{name}"]

    def of_layer(self, layer: int) -> CalibrationLayout:
        """The layout of a file with this layer alone."""
        return CalibrationLayout(self.metadata.model_copy(update={"layers": (layer,)}))

    def _tensors(self) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        m = self.metadata
        small = {
            "counts": ("I64", (m.experts,)),
            "weight_sum": ("F64", (m.experts,)),
            "weight_square_sum": ("F64", (m.experts,)),
            "confidence": ("I64", (CONFIDENCE_BINS,)),
            "stream_power": ("F64", (m.windows,)),
            "blake3": ("U8", (32,)),
            "second_moment": ("F32", (m.hidden, m.hidden)),
        }
        large = {
            "inputs": ("BF16", (m.total, m.hidden)),
            "experts": ("I32", (m.total, m.top_k)),
            "weights": ("F32", (m.total, m.top_k)),
        }
        # The widest types first, so that every tensor is aligned.
        for group in (small, large):
            for layer in m.layers:
                for name, (dtype, shape) in group.items():
                    yield f"layers.{layer}.{name}", dtype, shape
            if group is small:
                yield "tokens", "I32", (m.windows, m.window)


def token_bytes(hidden: int, top_k: int, layers: int) -> int:
    """Bytes that one token takes in the file."""
    return layers * (2 * hidden + 8 * top_k)
