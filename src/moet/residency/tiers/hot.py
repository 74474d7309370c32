"""The adaptive hot set of a GPU: which experts run at FP4 for now, because decoding uses them most.

As `residency.hot_set`, for tiers: they bring in any row that a step asks for, so members need no
pool of their own. Their rows are fetched when they are chosen, and they join at the next decision,
however soon the rows are there.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from moet.residency.heat import Heat
from moet.residency.hot_set import HotSetOptions, exchange
from moet.residency.policy import I64, POLICIES
from moet.residency.tiers.decide import touch

_HALF_LIFE = 1024  # steps


class TierHotSet:
    """The members, and those on their way.

    Args:
        shape: layers and experts. capacity: the most members; may be changed.
        fetch: starts to bring in rows, by flat index, and adds those that cannot be read to the
            set that it is given. They do not join.

    Attributes:
        members: bool [layers, experts]. exchanges: members that were replaced.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        options: HotSetOptions,
        capacity: int,
        fetch: Callable[[list[int], set[int]], object],
    ) -> None:
        self.members = np.zeros(shape, np.bool_)
        self.capacity, self.exchanges = capacity, 0
        self._margin = float(np.log2(options.margin))
        self._heat = Heat(np.zeros(shape), _HALF_LIFE)
        self._policy = POLICIES["lfu"](self._heat)
        self._fetch = fetch
        self._arriving: list[int] = []
        self._failed: set[int] = set()

    @property
    def size(self) -> int:
        return int(np.count_nonzero(self.members))

    def decide(self, use: I64, step: int) -> None:
        """use: int64 [layers, experts], how many of the decode steps since the last decision used
        each expert, up to `step`."""
        touch(self._heat, self._policy, use, step)
        members, heat = self.members.reshape(-1), self._heat.log.reshape(-1)
        members[[row for row in self._arriving if row not in self._failed]] = True
        inside = np.flatnonzero(members)
        excess = inside[np.argsort(heat[inside], kind="stable")][
            : max(0, self.size - self.capacity)
        ]
        members[excess] = False
        leaving, joining = exchange(heat, members, self.capacity, self._margin)
        members[leaving] = False
        self.exchanges += len(leaving)
        self._arriving, self._failed = joining.tolist(), set()
        if self._arriving:
            self._fetch(self._arriving, self._failed)
