"""What hash-routed layers are about to use, as the GPU tells it at the start of a pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from moet.errors import UnsupportedError
from moet.formats.layout import Precision
from moet.residency.cuda.mailbox import mask_words


@dataclass(frozen=True)
class Routes:
    """The hash-routed layers. layers: indices in the table of rows, ascending. tables: of each,
    int32 or int64 [vocabulary, top-k] on the device: the experts of a token's id."""

    layers: tuple[int, ...]
    tables: tuple[Tensor, ...]

    @classmethod
    def of(cls, tables: Mapping[int, Tensor]) -> Routes:
        """Raises UnsupportedError for tables that differ in form."""
        layers = tuple(sorted(tables))
        made = cls(layers, tuple(tables[layer] for layer in layers))
        if any(
            (table.shape, table.dtype) != (made.tables[0].shape, made.tables[0].dtype)
            or not table.is_contiguous()
            for table in made.tables
        ):
            raise UnsupportedError("hash-routed layers whose tables differ in form.")
        return made


def hints_type(layers: int, planes: int, experts: int) -> np.dtype[np.void]:
    """`Hints` of ahead.cu."""
    return np.dtype(
        [
            *[("number", np.uint64), ("line", np.uint64, 15)],
            ("missing", np.uint32, (layers, planes, mask_words(experts))),
        ]
    )


class Hints:
    """The host's side.

    Args:
        planes: as of `Mailbox`. memory: uint8, pinned; cleared here.

    Attributes:
        number: uint64 [1], raised by the device with each hint. seen: the newest that was taken.
    """

    def __init__(
        self,
        layers: Sequence[int],
        planes: Mapping[Precision, int],
        experts: int,
        memory: NDArray[np.uint8],
    ) -> None:
        memory[:] = 0
        self.memory = memory
        fields = memory.view(hints_type(len(layers), len(planes), experts))
        self.number, self._missing = fields["number"], fields["missing"][0]
        self.seen = 0
        self._layers, self._planes, self._experts = layers, planes, experts

    def poll(self) -> dict[Precision, list[int]] | None:
        """As of `TierDevice.poll_ahead`."""
        number = int(self.number[0])
        if number == self.seen:
            return None
        self.seen = number
        bits = np.unpackbits(self._missing.view(np.uint8), axis=2, bitorder="little")
        return {
            precision: [
                layer * self._experts + expert
                for layer, of in zip(self._layers, bits[:, plane], strict=True)
                for expert in np.flatnonzero(of).tolist()
            ]
            for precision, plane in self._planes.items()
        }
