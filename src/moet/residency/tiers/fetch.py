"""Rows that steps will soon ask for, brought in beside them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from moet.residency.tiers.device import Tier
from moet.residency.tiers.planner import Planner
from moet.residency.tiers.rows import RowState, RowTiers


class Fetch:
    """Reads rows into the arena and sends them on to free GPU slots.

    Decode keeps them from their first use on. failed: rows that could not be read are added to it.
    """

    def __init__(
        self,
        rows: RowTiers,
        planner: Planner,
        wanted: Sequence[int],
        at_once: int,
        failed: set[int],
    ) -> None:
        self._rows, self._planner, self._at_once = rows, planner, at_once
        self._todo, self._failed = deque(wanted), failed
        self._reading: set[int] = set()

    def arrived(self, errors: Mapping[int, Exception]) -> None:
        """Sees to the rows whose reads have ended; errors: of reads that have just failed."""
        for row in [row for row in self._reading if row not in self._rows.reading]:
            self._reading.remove(row)
            if row in errors:
                self._failed.add(row)
            else:
                self._settle(row)

    def advance(self) -> bool:
        """Starts more reads; whether all have ended."""
        rows = self._rows
        while self._todo and len(self._reading) < self._at_once:
            row = self._todo[0]
            if rows.state[row] == RowState.DISK and not rows.begin_read(row):
                break
            self._todo.popleft()
            if rows.state[row] == RowState.READING:
                self._reading.add(row)
            else:
                self._settle(row)
        return not (self._todo or self._reading)

    def _settle(self, row: int) -> None:
        if self._rows.resident(row, Tier.ARENA):
            self._planner.promote(row)
