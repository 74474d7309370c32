"""The rows of one precision: where each is, and the only transitions there are."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container
from concurrent.futures import Future
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from moet.errors import ConfigError, ResidencyError
from moet.formats.layout import Precision
from moet.residency.reader import ReadResult
from moet.residency.tiers.device import I64, Copy, Entry, Place, Tier, TierDevice
from moet.residency.tiers.options import TierSizes
from moet.residency.tiers.places import Places
from moet.residency.tiers.reads import RowReads
from moet.residency.tiers.table import TableWriter


class RowState(IntEnum):
    """What happens to a row.

    DISK: no place, entry 0. READING: an arena place is being filled, entry 0. RESIDENT: one place,
    the entry points to it. MOVING: the entry points to one place while another is being filled.
    """

    DISK = 0
    READING = 1
    RESIDENT = 2
    MOVING = 3


_RESIDENT = int(RowState.RESIDENT)  # members are slow to look up where it is done for every row


@dataclass
class RowCounts:
    """promotions: rows moved from the arena to GPU memory; demotions: back; evictions: rows that
    are on disk only again; read_errors: rows that could not be read."""

    promotions: int = 0
    demotions: int = 0
    evictions: int = 0
    read_errors: int = 0


class RowTiers:
    """State of the rows of one precision, by flat index: layer index · experts + expert.

        DISK → READING → RESIDENT ⇄ MOVING        READING → DISK: it could not be read
        RESIDENT → DISK: dropped

    Called by the owner thread only. Rows that decode *keeps* are `kept`, in memory or to be so from
    their next use on; the other resident rows of the arena are `passing`, oldest first. Pinned rows
    are not dropped: a step has been told that they are in memory and has yet to read their entries.
    """

    def __init__(
        self,
        precision: Precision,
        owned: NDArray[np.bool_],
        sizes: TierSizes,
        row_bytes: int,
        device: TierDevice,
        table: TableWriter,
        reads: RowReads,
    ) -> None:
        self.precision, self.row_bytes = precision, row_bytes
        self.owned = owned
        self._owned, self._count = owned.reshape(-1), int(owned.sum())
        self.num_experts = owned.shape[1]
        self.state = np.zeros(owned.size, np.uint8)
        self.tier = np.full(owned.size, Tier.DISK, np.uint8)  # of the place in the table
        self.index = np.full(owned.size, -1, np.int64)  # of that place
        self.kept = np.zeros(owned.size, np.bool_)
        self.passing: OrderedDict[int, None] = OrderedDict()
        self.pinned: Container[int] = ()
        self.gpu, self.arena = Places(sizes.slots), Places(sizes.places)
        self.moving: dict[int, tuple[Place, Copy]] = {}
        self.reading: dict[int, tuple[int, Future[ReadResult]]] = {}
        self.counts = RowCounts()
        self._device, self._table, self._reads = device, table, reads
        device.resize(precision, Tier.GPU, sizes.slots, row_bytes)
        device.resize(precision, Tier.ARENA, sizes.places, row_bytes)

    def places(self, tier: Tier) -> Places:
        return self.gpu if tier == Tier.GPU else self.arena

    def resident(self, row: int, tier: Tier) -> bool:
        """Whether the row rests in this tier."""
        return bool(self.state[row] == _RESIDENT and self.tier[row] == tier)

    @property
    def on_the_way(self) -> int:
        """Rows that hold two places, or did until readers of the old one end."""
        old = self._table.giving_up + self.gpu.retired + self.arena.retired
        return len(self.moving) + old

    @property
    def room(self) -> int:
        """Places, leaving ones apart, beyond one for each row."""
        return self.gpu.limit + self.arena.limit - self._count

    def coming(self, tier: Tier) -> int:
        """Places of a tier that will be free when the step that runs is done, at most."""
        return self._table.giving_up + self.places(tier).retired

    @property
    def all_in_memory(self) -> bool:
        """Whether there is nothing that a request could ask for. Any thread."""
        return bool(((self.state >= _RESIDENT) | ~self._owned).all())

    def begin_read(self, row: int, urgent: bool = False) -> bool:
        """DISK → READING, if the arena has a free place. The last one is for urgent reads only."""
        assert self.state[row] == RowState.DISK
        if not urgent and self.arena.spare < 2:
            return False
        index = self.arena.take(row, leaving=urgent)
        if index is None:
            return False
        view = self._device.view(Place(self.precision, Tier.ARENA, index))
        self.state[row] = RowState.READING
        layer, expert = divmod(row, self.num_experts)
        self.reading[row] = (index, self._reads.start(layer, expert, self.precision, view))
        return True

    def finish_reads(self) -> tuple[list[ReadResult], dict[int, Exception]]:
        """READING → RESIDENT for the reads that have ended, → DISK for those that failed.

        Returns (results, why each other row failed).
        """
        results, errors = [], {}
        for row, (index, future) in list(self.reading.items()):
            if not future.done():
                continue
            del self.reading[row]
            error = future.exception()
            if error is None:
                results.append(future.result())
                self._settle(row, Place(self.precision, Tier.ARENA, index), None)
            elif isinstance(error, Exception):
                self.arena.give(index)
                self.state[row] = RowState.DISK
                self.counts.read_errors += 1
                errors[row] = error
            else:
                raise error
        return results, errors

    def begin_move(self, row: int, tier: Tier, leaving: bool = False) -> bool:
        """RESIDENT → MOVING, if there is a free place in `tier`."""
        assert self.state[row] == RowState.RESIDENT
        index = self.places(tier).take(row, leaving)
        if index is None:
            return False
        source = Place(self.precision, Tier(int(self.tier[row])), int(self.index[row]))
        target = Place(self.precision, tier, index)
        self.passing.pop(row, None)
        self.state[row] = RowState.MOVING
        self.moving[row] = (target, self._device.start_copy(source, target))
        return True

    def finish_moves(self) -> bool:
        """MOVING → RESIDENT for the copies that have ended; whether there were any."""
        over = [row for row, (_, copy) in self.moving.items() if copy.done()]
        for row in over:
            target, _ = self.moving.pop(row)
            source = Tier(int(self.tier[row]))
            self.counts.promotions += target.tier < source
            self.counts.demotions += target.tier > source
            self._settle(row, target, (self.places(source), int(self.index[row]), row))
        return bool(over)

    def drop(self, row: int) -> None:
        """RESIDENT → DISK: the pack still has it."""
        assert self.state[row] == RowState.RESIDENT
        assert row not in self.pinned
        old = (self.places(Tier(int(self.tier[row]))), int(self.index[row]), row)
        self._table.point(self._entry(row, None), old)
        self.state[row] = RowState.DISK
        self.tier[row], self.index[row] = Tier.DISK, -1
        self.passing.pop(row, None)
        self.counts.evictions += 1

    def reclaim(self, done: int, present: Container[int] | None) -> bool:
        """Frees the places of both tiers that nothing reads any more (`Places.reclaim`)."""
        freed = self.arena.reclaim(done, present)
        return self.gpu.reclaim(done, present) or freed

    def keep(self, rows: I64, kept: bool) -> None:
        """Decode keeps these rows from now on, or does not."""
        self.kept[rows] = kept
        resting = (self.state[rows] == RowState.RESIDENT) & (self.tier[rows] == Tier.ARENA)
        for row in rows[resting].tolist():
            if kept:
                self.passing.pop(row, None)
            else:
                self.passing[row] = None

    def coldest(
        self, tier: Tier, priority: NDArray[np.float64], exclude: Container[int] = ()
    ) -> int | None:
        """The row of a tier to be dropped first: passing ones by age, then by priority."""
        if tier == Tier.ARENA:
            for row in self.passing:
                if row not in self.pinned and row not in exclude:
                    return row
        resting = (self.state == RowState.RESIDENT) & (self.tier == tier)
        for group in (resting & ~self.kept, resting & self.kept):
            rows = np.flatnonzero(group)
            worth = priority[rows]
            for _ in range(len(rows)):  # sorting all to get at the first would take longer
                lowest = int(np.argmin(worth))
                row = int(rows[lowest])
                if row not in self.pinned and row not in exclude:
                    return row
                worth[lowest] = np.inf
        return None

    def resize(self, tier: Tier, count: int) -> None:
        """Gives back the places from `count` on, all free, or adds some. Raises ConfigError."""
        places = self.places(tier)
        try:
            self._device.resize(self.precision, tier, count, self.row_bytes)
        except ConfigError:
            places.grow(places.count)
            raise
        if count < places.count:
            places.cut()
        else:
            places.grow(count)

    def check(self) -> None:
        """Raises ResidencyError where the books do not agree: a bug in moet."""
        for tier in (Tier.GPU, Tier.ARENA):
            places = self.places(tier)
            rows = np.flatnonzero(self.tier == tier)
            mine = {int(self.index[row]): int(row) for row in rows}
            mine |= {t.slot: row for row, (t, _) in self.moving.items() if t.tier == tier}
            if tier == Tier.ARENA:
                mine |= {index: row for row, (index, _) in self.reading.items()}
            taken = {index: row for index, row in enumerate(places.row_in) if row >= 0}
            if taken != mine or len(taken) + places.spare + places.retired != places.count:
                raise ResidencyError(f"{self.precision} {tier.name} places disagree with rows.")

    def _settle(self, row: int, place: Place, old: tuple[Places, int, int] | None) -> None:
        self._table.point(self._entry(row, place), old)
        self.state[row] = RowState.RESIDENT
        self.tier[row], self.index[row] = place.tier, place.slot
        if place.tier == Tier.ARENA and not self.kept[row]:
            self.passing[row] = None

    def _entry(self, row: int, place: Place | None) -> Entry:
        layer, expert = divmod(row, self.num_experts)
        return Entry(self.precision, layer, expert, place)
