"""The adaptive hot set: which experts run at FP4 for now, because decoding uses them most.

Decisions are made every so many steps, from the decayed counts of the steps before: never by the
time. A newcomer replaces a member only if it is hotter by a margin, so that two experts that are
about as hot do not swap places for ever. What a request is answered depends on what was served
before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moet.residency.metrics import Counters
from moet.residency.pool import I64, Mask, SlotPool
from moet.residency.reader import ReadResult


@dataclass(frozen=True)
class HotSetOptions:
    """every: steps between two decisions. margin: by what factor the decayed count of a newcomer
    must exceed that of the member it replaces."""

    every: int = 64
    margin: float = 1.5


class HotSet:
    """The members, and those on their way: rows that are read in the background join at the next
    decision, however soon they are there.

    Args:
        pool: of hot rows and nothing else; the set is as large as it can keep, and any of its rows
            may join. read: starts to read a row into a slot.
        assign: from now on leases take these rows from the hot pool (True), or no longer (False).
    """

    def __init__(
        self,
        options: HotSetOptions,
        pool: SlotPool,
        read: Callable[[int, int], Future[ReadResult]],
        assign: Callable[[I64, bool], None],
        counters: Counters,
    ) -> None:
        self.pool = pool
        self._options = options
        self._read, self._assign, self._counters = read, assign, counters
        self._members = np.zeros(pool.kept.size, np.bool_)
        self._arriving: deque[tuple[int, int, Future[ReadResult]]] = deque()  # row, slot, read
        self.exchanges = 0  # members that were replaced

    @property
    def size(self) -> int:
        return int(np.count_nonzero(self._members))

    def begin_step(self, step: int, heat: NDArray[np.float64]) -> None:
        """Decides, if it is time. heat: base-2 logarithm of the decayed counts, [rows].

        No row of the hot pool may be leased. Waits for rows that were asked for last time. A row
        that could not be read does not join.
        """
        if step % self._options.every:
            return
        while self._arriving:
            self._join(*self._arriving.popleft())
        leaving, joining = exchange(
            heat,
            self._members,
            self.pool.keepable,
            float(np.log2(self._options.margin)),
        )
        self.exchanges += len(leaving)
        self._members[leaving] = False
        self._assign(leaving, False)
        self.pool.unkeep(leaving)
        for row in joining.tolist():
            slot = self.pool.take(row, wait=True)
            assert slot is not None
            self._arriving.append((row, slot, self._read(row, slot)))

    def _join(self, row: int, slot: int, read: Future[ReadResult]) -> None:
        if read.exception() is not None:
            self._counters.read_errors += 1
            self.pool.discard(slot)
            return
        self._counters.add_read(read.result())
        self.pool.publish(slot)
        self.pool.kept[row] = True
        self.pool.promotions += 1
        self._members[row] = True
        self._assign(np.array([row]), True)


def exchange(
    heat: NDArray[np.float64], members: Mask, capacity: int, margin: float
) -> tuple[I64, I64]:
    """Which members leave and which candidates join: (leaving, joining), rows.

    Empty places go to the hottest; a member is replaced by one whose heat exceeds its own by more
    than `margin`. The same heat gives the same answer.
    """
    others = np.flatnonzero(~members & (heat > -np.inf))
    others = others[np.argsort(-heat[others], kind="stable")]
    inside = np.flatnonzero(members)
    inside = inside[np.argsort(heat[inside], kind="stable")]
    room = max(0, capacity - len(inside))
    rest = others[room:]
    pairs = min(len(rest), len(inside))
    # The one falls and the other rises, so those that win come first.
    wins = int(np.count_nonzero(heat[rest[:pairs]] > heat[inside[:pairs]] + margin))
    return inside[:wins], others[: room + wins]
