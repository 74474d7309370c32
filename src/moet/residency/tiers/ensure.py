"""One request of the device: brings the missing rows in, whatever it takes, or says why not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice

from moet.errors import MoetError, ResidencyError
from moet.formats.layout import Precision
from moet.residency.tiers.device import Request, Tier
from moet.residency.tiers.planner import Planner
from moet.residency.tiers.rows import RowState, RowTiers
from moet.residency.tiers.table import TableWriter


class Ensure:
    """Serves one request.

    The GPU waits meanwhile and reads nothing but `present`, so any other row may be dropped and
    its place be used at once. A missing row comes into the arena; when no place is left there,
    missing rows that have come go on to GPU slots, whose rows are dropped. One arena place is free
    again at the end (see `options.check_sizes`), if that is possible at all.
    """

    def __init__(
        self,
        request: Request,
        step: int,
        tiers: Mapping[Precision, RowTiers],
        planners: Mapping[Precision, Planner],
        table: TableWriter,
    ) -> None:
        self.request, self.step = request, step
        self.error: Exception | None = None
        self._parts = [
            _Part(
                rows,
                planners[precision],
                table,
                request.layer,
                _flat(rows, request.layer, request.missing.get(precision, ())),
                frozenset(_flat(rows, request.layer, request.present.get(precision, ()))),
            )
            for precision, rows in tiers.items()
        ]

    @property
    def all_started(self) -> bool:
        """Whether all reads have been started: other rows may take places that are free now."""
        return all(part.all_started for part in self._parts)

    def advance(self, done: int, errors: Mapping[Precision, Mapping[int, Exception]]) -> bool:
        """Does what can be done now; whether the request can be answered (`error` says how).

        Args:
            done: the newest finished step. errors: of the reads that have just failed.
        """
        for part in self._parts:
            failed = errors.get(part.rows.precision, {})
            error = next((failed[row] for row in failed if row in part.missing), None)
            self.error = self.error or error
        ready = True
        for part in self._parts:
            if self.error is not None:
                part.give_up()
            try:
                ready &= part.advance(done)
            except ResidencyError as error:
                self.error, ready = error, False
        return ready


def _flat(rows: RowTiers, layer: int, experts: Sequence[int]) -> list[int]:
    first = layer * rows.num_experts
    return [first + int(expert) for expert in experts]


class _Part:
    """The rows of one precision. Pins the missing ones until the step has read them."""

    def __init__(
        self,
        rows: RowTiers,
        planner: Planner,
        table: TableWriter,
        layer: int,
        missing: list[int],
        present: frozenset[int],
    ) -> None:
        self.rows, self.missing, self.present = rows, frozenset(missing), present
        self._used = present | self.missing
        self._planner, self._table, self._layer = planner, table, layer
        self._todo = missing[::-1]  # whose reads have not been started
        self._coming = missing  # not in memory yet
        rows.pinned = self.missing

    @property
    def all_started(self) -> bool:
        return not self._todo

    def give_up(self) -> None:
        """Brings in no more rows; that a place is left free matters all the same."""
        self._todo, self._coming = [], []

    def advance(self, done: int) -> bool:
        """Goes on as far as possible; whether all missing rows are in memory."""
        rows = self.rows
        if not self.missing:
            return True
        while True:
            rows.reclaim(done, self.present)
            self._drop_passing()
            self._start_reads()
            if not self._todo and rows.arena.spare:
                break
            # Places are needed: for the rows still to be read, and one to be left free.
            if self._becoming_free() > len(self._todo):
                return False
            if not (self._evict() or self._spill()):
                if rows.reading or rows.moving:
                    return False
                if self._todo:
                    raise self._too_small()
                break
            self._table.flush()
        there = rows.state >= RowState.RESIDENT
        self._coming = [row for row in self._coming if not there[row]]
        return not self._coming

    def _becoming_free(self) -> int:
        """Arena places that will be free when the copies that run have ended."""
        rows, arena, gpu = self.rows, Tier.ARENA, Tier.GPU
        return sum(
            rows.tier[row] == arena and place.tier == gpu and row not in self.present
            for row, (place, _) in rows.moving.items()
        )

    def _drop_passing(self) -> None:
        """Takes the places of passing rows first, so that those that are free stay so for moves
        (here a dropped row's place is free at once, beside a running step only after it)."""
        rows = self.rows
        if not self._todo:
            return
        free = max(1, self._planner.limits.moves + 1 - self._planner.lent)
        count = len(self._todo) + free - rows.arena.spare
        idle = (row for row in rows.passing if row not in self._used)
        for row in list(islice(idle, max(0, count))):
            rows.drop(row)
        if self._table.flush():
            rows.reclaim(0, self.present)

    def _start_reads(self) -> None:
        rows = self.rows
        while self._todo:
            row = self._todo[-1]
            if rows.state[row] == RowState.DISK and not rows.begin_read(row, urgent=True):
                return
            self._todo.pop()

    def _evict(self) -> bool:
        """Drops the coldest arena row that this layer does not use."""
        row = self.rows.coldest(Tier.ARENA, self._planner.priority, self._used)
        if row is None:
            return False
        self.rows.drop(row)
        return True

    def _spill(self) -> bool:
        """Sends a missing row that has come on to a GPU slot."""
        rows = self.rows
        row = next((r for r in self.missing if rows.resident(r, Tier.ARENA)), None)
        if row is None:
            return False
        if not rows.gpu.spare:
            victim = rows.coldest(Tier.GPU, self._planner.priority, self._used)
            if victim is None:
                return False
            rows.drop(victim)
            self._table.flush()
            rows.reclaim(0, self.present)
        return rows.begin_move(row, Tier.GPU, leaving=True)

    def _too_small(self) -> MoetError:
        rows, used = self.rows, len(self._used)
        needed = max(rows.arena.count + 1, used + 2 - rows.gpu.count)
        return ResidencyError(
            f"layer index {self._layer}: a step uses {used} {rows.precision} rows at once, and an "
            f"arena of {rows.arena.count} places beside {rows.gpu.count} GPU slots cannot hold "
            f"them.",
            f"Make the arena at least {needed} rows ({needed * rows.row_bytes / 2**30:.3g} GiB), "
            f"or serve fewer tokens in a step.",
        )
