"""A tier made smaller while it serves: rows move out of the places that are given up."""

from __future__ import annotations

from concurrent.futures import Future

from moet.residency.tiers.device import Tier
from moet.residency.tiers.planner import Planner
from moet.residency.tiers.rows import RowTiers


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
        """Starts the next move out, if one may start; whether the tier has its new size."""
        places, rows = self._places, self.rows
        # A place stays free in the arena for the requests to come.
        stays_free = 1 if self.tier == Tier.ARENA else 0
        if places.left and places.free >= stays_free:
            rows.resize(self.tier, places.limit)
            self.future.set_result(None)
            return True
        if rows.on_the_way >= self._planner.limits.moves:
            return False
        leaving = [
            row
            for row in places.row_in[places.limit :]
            if row >= 0 and rows.resident(row, self.tier)
        ]
        if leaving and places.free > stays_free:
            rows.begin_move(leaving[0], self.tier)
            return False
        row = rows.coldest(self.tier, self._planner.priority)
        if row is None:
            return False
        if self.tier == Tier.GPU:
            self._planner.send_away(row)
        else:
            rows.drop(row)
        return False
