"""A tier made smaller while it serves: rows move out of the places that are given up."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future

import numpy as np

from moet.residency.tiers.device import Tier
from moet.residency.tiers.planner import Planner
from moet.residency.tiers.rows import RowState, RowTiers


class Shrink:
    """One shrinking tier of one precision.

    A row in a leaving place moves to a place of its tier that stays. Where there is none, the
    coldest row of the tier makes room: it goes one tier down.
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
        places, rows = self._places, self.rows
        # A place stays free in the arena for the requests to come.
        stays_free = 1 if self.tier == Tier.ARENA else 0
        leaving = self._leaving()
        while not places.left or places.free < stays_free:
            if rows.on_the_way >= self._planner.limits.moves:
                return False
            if places.free > stays_free and (row := next(leaving, None)) is not None:
                rows.begin_move(row, self.tier)
                continue
            row = rows.coldest(self.tier, self._planner.priority)
            if row is None:
                return False
            if self.tier == Tier.ARENA:
                rows.drop(row)
            elif not self._planner.make_way(row):
                self._planner.send_away(row)
        rows.resize(self.tier, places.limit)
        self.future.set_result(None)
        return True

    def _leaving(self) -> Iterator[int]:
        """Rows that rest in leaving places."""
        rows = self.rows
        resting = (rows.state == RowState.RESIDENT) & (rows.tier == self.tier)
        for row in np.flatnonzero(resting & (rows.index >= self._places.limit)).tolist():
            if rows.resident(row, self.tier):
                yield row
