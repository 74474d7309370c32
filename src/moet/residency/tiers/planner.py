"""Which rows of one precision move: decided from decode's heat, every few steps."""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from moet.residency.heat import Heat
from moet.residency.policy import I64, POLICIES
from moet.residency.tiers.decide import swaps, touch
from moet.residency.tiers.device import Tier
from moet.residency.tiers.options import Limits, TierOptions
from moet.residency.tiers.rows import RowState, RowTiers


class Planner:
    """Moves rows of one precision beside the steps; never while a request is open.

    At most `moves` rows are on the way at a time. Called by the owner thread only.

    Args:
        heat: of this precision. limits: from the sizes; replaced when they change.

    Attributes:
        lent: places that were free and that the running step's rows have taken ahead of their use;
            others are made free for them after the step.
    """

    def __init__(self, rows: RowTiers, heat: Heat, options: TierOptions, limits: Limits) -> None:
        self.limits = limits
        self.lent = 0
        self.heat = heat
        self._rows = rows
        self._policy = POLICIES[options.policy](heat)
        self._margin = options.margin
        self._promote: deque[int] = deque()
        self._demote: deque[int] = deque()

    @property
    def priority(self) -> NDArray[np.float64]:
        """By row."""
        return self._policy.priority.reshape(-1)

    def preference(self) -> list[int]:
        """All rows, hottest first; alike ones in turns of the layers."""
        rows = np.flatnonzero(self._rows.owned)
        experts, layers = rows % self._rows.num_experts, rows // self._rows.num_experts
        order = np.lexsort((layers, experts, -self.heat.log.reshape(-1)[rows]))
        result: list[int] = rows[order].tolist()
        return result

    def plan(self, use: I64, step: int) -> None:
        """Decides anew, given how often decode used each row since the last time ([layers,
        experts]) up to `step`."""
        touch(self.heat, self._policy, use, step)
        rows = self._rows
        self._keep(np.flatnonzero(~rows.kept & (use.reshape(-1) > 0)))
        resting = rows.state == RowState.RESIDENT
        promote, demote = swaps(
            self._policy,
            np.flatnonzero(resting & rows.kept & (rows.tier == Tier.ARENA)),
            np.flatnonzero(resting & (rows.tier == Tier.GPU)),
            rows.gpu.free + rows.gpu.retired,
            self._margin,
        )
        self._promote, self._demote = deque(promote), deque(demote)

    def promote(self, row: int) -> None:
        """Puts a row at the end of those that are to be on the GPU."""
        self._promote.append(row)

    def move(self) -> bool:
        """Starts what can be started now; whether anything was."""
        started = False
        while self._rows.on_the_way < self.limits.moves and self._step():
            started = True
        return self._make_room() or started

    def _step(self) -> bool:
        """One promotion, or one demotion that makes room for it."""
        rows = self._rows
        while self._promote and not rows.resident(self._promote[0], Tier.ARENA):
            self._promote.popleft()
        if not self._promote:
            return False
        if rows.begin_move(self._promote[0], Tier.GPU):
            self._promote.popleft()
            return True
        while self._demote:
            row = self._demote[0]
            if not rows.resident(row, Tier.GPU):
                self._demote.popleft()
                continue
            if rows.arena.spare < 2 and (rows.coming(Tier.ARENA) or self._colder(row) is not None):
                return False  # the arena will have a place for it
            self._demote.popleft()
            if self.send_away(row):
                return True
        return False

    def send_away(self, row: int) -> bool:
        """GPU → arena, or → disk where the arena is full; whether the row may go."""
        rows = self._rows
        if rows.arena.spare > 1 and rows.begin_move(row, Tier.ARENA):
            return True
        if row in rows.pinned:
            return False
        rows.drop(row)
        return True

    def make_way(self, row: int) -> bool:
        """Drops the coldest arena row if the arena is full and that row is worth less than this
        one of the GPU, which is to leave; whether a row was dropped."""
        if self._rows.arena.spare > 1 or (other := self._colder(row)) is None:
            return False
        self._rows.drop(other)
        return True

    def _make_room(self) -> bool:
        """Drops arena rows, so that there are free places for moves and for the next request:
        passing rows, or colder ones than the next to leave the GPU; any for the last place."""
        rows = self._rows
        free = rows.arena.spare + rows.coming(Tier.ARENA) + self.lent
        if free > self.limits.moves or (free and not rows.passing and not self._demote):
            return False
        if rows.room > 1 and rows.all_in_memory:  # no request can come; two places change rows
            return False
        row = rows.coldest(Tier.ARENA, self.priority)
        if row is None:
            return False
        if free and row not in rows.passing:
            leaves = self._demote[0] if self._demote else row
            if not self.priority[row] < self.priority[leaves]:
                return False
        rows.drop(row)
        return True

    def _colder(self, row: int) -> int | None:
        """The coldest arena row, if it is worth less than this one."""
        other = self._rows.coldest(Tier.ARENA, self.priority)
        if (
            other is None
            or other in self._rows.passing
            or self.priority[other] < self.priority[row]
        ):
            return other
        return None

    def _keep(self, candidates: I64) -> None:
        rows = self._rows
        kept = np.flatnonzero(rows.kept)
        capacity = rows.gpu.limit + rows.arena.limit - self.limits.streaming
        room = max(0, capacity - len(kept))
        admitted, victims = self._policy.admit(candidates, kept, room)
        rows.keep(victims, False)
        rows.keep(admitted, True)
