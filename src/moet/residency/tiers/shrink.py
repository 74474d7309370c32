"""A tier made smaller while it serves: rows move out of the places that are given up."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np

from moet.residency.tiers.device import Tier
from moet.residency.tiers.planner import Planner
from moet.residency.tiers.rows import RowState, RowTiers


class Shrink:
    """One shrinking tier of one precision.

    A row in a leaving place moves to a place of its tier that stays. Where there is none, the
    arena's hottest row moves to the GPU if that has room, and otherwise the coldest row of the tier
    goes one tier down.
    """

    def __init__(
        self, rows: RowTiers, planner: Planner, tier: Tier, count: int, future: Future[None]
    ) -> None:
        self.rows, self.tier, self.future = rows, tier, future
        self._planner = planner
        self._places = rows.places(tier)
        self._places.leave(count)

    def advance(self) -> bool:
        """Starts the moves out that may start; whether the tier has its new size."""
        places, rows, priority = self._places, self.rows, self._planner.priority
        # A place stays free in the arena for the requests to come.
        stays_free = 1 if self.tier == Tier.ARENA else 0
        leaving = self._leaving()
        while not places.left or places.free < stays_free:
            if rows.on_the_way >= self._planner.limits.moves:
                return False
            while leaving and not rows.resident(leaving[-1], self.tier):
                leaving.pop()
            if leaving and places.free > stays_free:
                rows.begin_move(leaving.pop(), self.tier)
                continue
            if len(leaving) + stays_free <= places.free + self._coming():
                return False
            if self.tier == Tier.ARENA and rows.gpu.free and self._go_up():
                continue
            row = rows.coldest(self.tier, priority)
            if row is None:
                return False
            if self.tier == Tier.ARENA:
                rows.drop(row)
            elif not self._planner.make_way(row):
                self._planner.send_away(row)
        rows.resize(self.tier, places.limit)
        self.future.set_result(None)
        return True

    def _leaving(self) -> list[int]:
        """Rows that rest in leaving places."""
        rows = self.rows
        resting = (rows.state == RowState.RESIDENT) & (rows.tier == self.tier)
        found: list[int] = np.flatnonzero(resting & (rows.index >= self._places.limit)).tolist()
        return found

    def _go_up(self) -> bool:
        """Sends the arena's hottest row to the GPU; whether there is one."""
        rows = self.rows
        resting = np.flatnonzero((rows.state == RowState.RESIDENT) & (rows.tier == Tier.ARENA))
        if not len(resting):
            return False
        row = resting[np.argmax(self._planner.priority[resting])]
        rows.keep(row[None], True)
        return rows.begin_move(int(row), Tier.GPU)

    def _coming(self) -> int:
        """Places of the tier that will be free when what is under way is over, at most."""
        rows = self.rows
        moving = sum(
            rows.tier[row] == self.tier and target.tier != self.tier
            for row, (target, _) in rows.moving.items()
        )
        return int(moving) + rows.coming(self.tier)
