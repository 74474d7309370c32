"""Rows that a step is about to use, read before it comes to wait for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from moet.residency.tiers.planner import Planner
from moet.residency.tiers.rows import RowState, RowTiers


class Prefetch:
    """Reads rows of one precision ahead, as far as the arena has free places.

    It takes nobody's place, and what it is told may be wrong or outdated: no promise rests on it.
    A row that comes is one that passes through, the last to be dropped of those; a layer that uses
    it finds it, or asks for it as for any other. The same goes for a row that could not be read.
    Places that it has taken are made up for after the step, which may use what is dropped for that.

    Attributes:
        count: rows whose reads were started.
    """

    def __init__(self, rows: RowTiers, planner: Planner) -> None:
        self.count = 0
        self._rows, self._owned = rows, rows.owned.reshape(-1)
        self._planner = planner
        self._todo: deque[int] = deque()

    def ask(self, wanted: Sequence[int]) -> None:
        """Forgets what it was told before. wanted: flat indices, in the order of their use."""
        self._planner.lent = 0
        passing = self._rows.passing
        for row in wanted:
            if row in passing:
                passing.move_to_end(row)
        self._todo = deque(row for row in wanted if self._owned[row])

    def advance(self) -> bool:
        """Starts reads; whether there was room for any."""
        rows, before = self._rows, self.count
        while self._todo:
            row = self._todo[0]
            if rows.state[row] == RowState.DISK:
                if not rows.begin_read(row):
                    break
                self.count += 1
                self._planner.lent += 1
            self._todo.popleft()
        return self.count > before
