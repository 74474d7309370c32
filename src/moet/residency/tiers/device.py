"""What the tiers need of a device: places for rows, copies, the table, steps, the mailbox."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moet.formats.layout import Precision
from moet.residency.metrics import Phase

U8 = NDArray[np.uint8]
I64 = NDArray[np.int64]


class Tier(IntEnum):
    """Where a row is, fastest first."""

    GPU = 0
    ARENA = 1
    DISK = 2


class Place(NamedTuple):
    """Room for one row of a precision: the slot of this number in GPU memory or in the arena."""

    precision: Precision
    tier: Tier
    slot: int


class Entry(NamedTuple):
    """A change of the table. layer: index. place: where the row is now; None: on disk only."""

    precision: Precision
    layer: int
    expert: int
    place: Place | None


@dataclass(frozen=True)
class Request:
    """An `ensure` step waits for rows of one layer.

    Posted after the step has read the table's entries of all experts it uses in this layer, once
    each. From then until the answer, the GPU reads no row but `present`: what it used in layers
    before has been read to the end.

    number: of the request; each is one more than the last. layer: index. missing: expert ids, by
    precision, whose entry was 0; they are read again after the answer. present: the others; the
    rest of the layer uses the places that were read.
    """

    number: int
    layer: int
    missing: Mapping[Precision, Sequence[int]]
    present: Mapping[Precision, Sequence[int]]


@dataclass(frozen=True)
class Counts:
    """What the device has counted since it was made. All only ever grow; they may lag by a step.

    steps: decode steps; steps_local: of these, those that read all rows from GPU memory.
    use: int64 [layers, experts] by precision: decode steps that used the row.
    rows: int64 [3] by precision and phase: rows used, by the tier that they were found in.
    """

    steps: int
    steps_local: int
    use: Mapping[Precision, I64]
    rows: Mapping[tuple[Precision, Phase], I64]


class Copy(ABC):
    """A copy that was started."""

    @abstractmethod
    def done(self) -> bool:
        """Whether the target has all bytes and the source is not read any more. Never blocks."""


class TierDevice(ABC):
    """One rank's device. All but `view`'s memory is used by the manager's owner thread only.

    Steps are counted from 1 by the work that runs on the device: `begun` is raised before the
    step's first read of the table, `done` after its last read of a row. One step at a time.
    """

    @abstractmethod
    def resize(self, precision: Precision, tier: Tier, places: int, row_bytes: int) -> None:
        """Makes a tier (GPU or ARENA) hold `places` rows; it has 0 at first.

        Adds places at the end or gives back the last ones, which nothing uses; the others keep
        their address and bytes. Raises ConfigError when there is not enough memory; the places are
        then as before.
        """

    @abstractmethod
    def view(self, place: Place) -> U8:
        """An arena place's memory, uint8 [row_bytes], for a thread that reads a row from disk."""

    @abstractmethod
    def start_copy(self, source: Place, target: Place) -> Copy:
        """Copies a row beside the running step; source and target may be of any tier in memory."""

    @abstractmethod
    def publish(self, entries: Sequence[Entry]) -> None:
        """Changes table entries, in this order.

        When it returns, every later read of the table on the device sees them, and a step whose
        `begun` is seen only after that reads them. Bytes that were written before are seen with
        them.
        """

    @abstractmethod
    def begun(self) -> int:
        """The newest step that may have read the table."""

    @abstractmethod
    def done(self) -> int:
        """The newest step such that it and all before it read no row any more; ≤ `begun`."""

    @abstractmethod
    def poll(self) -> Request | None:
        """The request that waits, if any; the same one until it is answered."""

    def poll_ahead(self) -> Mapping[Precision, Sequence[int]] | None:
        """What steps that have been launched are expected to use: flat row indices, layer index ·
        experts + expert, in the order of their use; None if nothing was said since the last call.

        Only a hint, which may be wrong, outdated or torn. `wait` ends when there is a new one.
        """
        return None

    @abstractmethod
    def answer(self, number: int, ok: bool) -> None:
        """Lets the step go on. Not ok: it fails, without reading rows whose entry is still 0."""

    @abstractmethod
    def live(self) -> None:
        """A sign that requests are being seen to. The device may give up a request that waits where
        there has been none for long; it is still to be answered, and fails its step."""

    @abstractmethod
    def counts(self) -> Counts:
        """The counts so far; never waits for the device."""

    @abstractmethod
    def wait(self, seconds: float, seen: int) -> None:
        """Blocks, without holding the interpreter, until a request with a higher number than `seen`
        waits, `poll_ahead` has something, or the time is over."""

    @abstractmethod
    def close(self) -> None:
        """Frees all places; no step runs any more."""
