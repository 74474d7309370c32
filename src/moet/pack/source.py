"""What residency needs of a pack: rows by key, read into given memory."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moet.closing import Closing
from moet.formats.layout import Precision, RowLayout


class RowKey(NamedTuple):
    """One row: a layer (the model's own index), an expert, a precision."""

    layer: int
    expert: int
    precision: Precision


class RowSource(Closing):
    """The lowest tier: every row can be read from here, at disk speed.

    Attributes:
        layers: the model's indices of its MoE layers, ascending (MTP layers included).
        num_experts: routed experts a layer.
        layouts: this rank's layout of the rows of each precision that exists.
        identity: changes when the rows' bytes could; heat files are keyed to it.
    """

    layers: tuple[int, ...]
    num_experts: int
    layouts: Mapping[Precision, RowLayout]
    identity: str

    @abstractmethod
    def read(self, key: RowKey, out: NDArray[np.uint8]) -> int:
        """Reads this rank's slices of a row into `out`, uint8 [layouts[precision].row_bytes].

        Checks the checksum. Returns the bytes read from storage. Thread-safe.
        Raises PackError or CheckpointError naming file, layer and expert; `out` is then undefined.
        """

    @abstractmethod
    def factors(self, layer: int, precision: Precision) -> NDArray[np.float32]:
        """float32 [num_experts, 3]: factors of gate, up, down."""

    def close(self) -> None:
        """Nothing, unless the source holds files."""
        return
