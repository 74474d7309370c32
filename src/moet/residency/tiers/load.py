"""The tiers filled before the first step: the hottest rows, as far as there is room."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future

import numpy as np

from moet.residency.tiers.device import Tier
from moet.residency.tiers.planner import Planner
from moet.residency.tiers.rows import RowState, RowTiers


class Load:
    """Reads rows into the arena and sends the hottest of them on to the GPU.

    Decode keeps them all, until it finds better ones. A few reads run at a time, so that a request
    need not wait for many. future: resolved at the end, with the first error if there was one.
    """

    def __init__(
        self, rows: RowTiers, planner: Planner, io_threads: int, future: Future[None]
    ) -> None:
        self.future = future
        self._rows, self._planner, self._ahead = rows, planner, 2 * io_threads
        places = max(0, rows.arena.limit - planner.limits.streaming)
        wanted = planner.preference()
        self._for_gpu = set(wanted[: rows.gpu.limit])
        self._todo = deque(wanted[: rows.gpu.limit + places])
        self._reading: set[int] = set()
        self._moving: set[int] = set()
        self._error: Exception | None = None
        self.total, self.seen = len(self._todo), 0  # rows

    def arrived(self, errors: Mapping[int, Exception]) -> None:
        """Sees to the rows whose reads have ended; errors: of reads that have just failed."""
        for row in [row for row in self._reading if row not in self._rows.reading]:
            self._reading.remove(row)
            self.seen += 1
            if row in errors:
                self._error = self._error or errors[row]
            elif self._rows.resident(row, Tier.ARENA):
                self._rows.keep(np.array([row]), True)
                if row in self._for_gpu:
                    self._planner.promote(row)
                    self._moving.add(row)

    def advance(self) -> bool:
        """Starts more reads; whether all rows are where they belong."""
        rows = self._rows
        while self._todo and len(self._reading) < self._ahead and self._error is None:
            row = self._todo[0]
            if rows.state[row] != RowState.DISK:
                self._todo.popleft()
                self.seen += 1
                continue
            if not rows.begin_read(row):
                break
            self._todo.popleft()
            self._reading.add(row)
        self._moving = {
            row for row in self._moving if rows.tier[row] == Tier.ARENA and rows.gpu.free
        } | {row for row in self._moving if row in rows.moving}
        if self._error is not None:
            self._todo.clear()
        if self._todo or self._reading or self._moving:
            return False
        if not self.future.done():
            if self._error is not None:
                self.future.set_exception(self._error)
            else:
                self.future.set_result(None)
        return True
