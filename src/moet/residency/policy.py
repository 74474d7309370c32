"""Which rows decode keeps in memory. Policies see the sequence of steps, never the time."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray

from moet.registry import Registry
from moet.residency.heat import Heat

I64 = NDArray[np.int64]


class Policy(ABC):
    """Ranks the rows; each pool keeps the highest that decode has asked for.

    A row is named by its flat index, layer index · experts + expert.

    Args:
        heat: of this rank; as loaded now, and up to date whenever a method is called.
    """

    @abstractmethod
    def __init__(self, heat: Heat) -> None: ...

    @abstractmethod
    def touch(self, layer: int | I64, experts: I64, step: int) -> None:
        """Decode uses `experts` (unique) of the layer at index `layer`, in memory or not.

        layer may also be int64 [n], the layer of each expert.
        """

    @property
    @abstractmethod
    def priority(self) -> NDArray[np.float64]:
        """How much each row is worth keeping: [layers, experts]."""

    def admit(self, rows: I64, kept: I64, room: int) -> tuple[I64, I64]:
        """Decides which of `rows`, just touched and not kept, are kept from now on.

        Args:
            rows: candidates. kept: rows that are kept. room: how many more can be kept.

        Returns (admitted rows, victims), the latter at most as many as the former less the room.
        Ties favour what is kept, then the lower index: the same steps give the same decisions.
        """
        priority = self.priority.reshape(-1)
        rows = rows[np.argsort(-priority[rows], kind="stable")]
        contenders = rows[room:]
        coldest = _lowest(priority, kept, len(contenders))
        # The one falls and the other rises, so the wins come first.
        wins = int(np.count_nonzero(priority[contenders[: len(coldest)]] > priority[coldest]))
        return rows[: room + wins], coldest[:wins]


def _lowest(priority: NDArray[np.float64], rows: I64, count: int) -> I64:
    """The `count` rows (ascending indices given) of lowest priority, lowest first."""
    if 0 < count < len(rows):
        bound = np.partition(priority[rows], count - 1)[count - 1]
        rows = rows[priority[rows] <= bound]
    return rows[np.argsort(priority[rows], kind="stable")][:count]


POLICIES: Registry[type[Policy]] = Registry("policy")


@POLICIES.register("lru")
class LeastRecentlyUsed(Policy):
    """Keeps what decode used last. Rows loaded at the start count as older, colder ones first."""

    def __init__(self, heat: Heat) -> None:
        counts = heat.counts(0).astype(np.float64)
        # In [−2, −1): before every step, and before a layer that runs ahead of the first step.
        self._last: NDArray[np.float64] = counts / (counts.max(initial=0.0) + 1) - 2

    def touch(self, layer: int | I64, experts: I64, step: int) -> None:
        self._last[layer, experts] = step + layer / len(self._last)

    @property
    def priority(self) -> NDArray[np.float64]:
        return self._last


@POLICIES.register("lfu")
class LeastFrequentlyUsed(Policy):
    """Keeps what decode used most often, older steps counting less (the heat's half-life)."""

    def __init__(self, heat: Heat) -> None:
        self._heat = heat

    def touch(self, layer: int | I64, experts: I64, step: int) -> None:
        """Nothing: the heat has counted it."""

    @property
    def priority(self) -> NDArray[np.float64]:
        return self._heat.log


@POLICIES.register("static")
class Static(Policy):
    """Keeps the rows that were hottest in the heat file; the others pass through.

    Without a heat file all rank alike, and what decode asks for first is kept.
    """

    def __init__(self, heat: Heat) -> None:
        self._ranking = heat.log.copy()

    def touch(self, layer: int | I64, experts: I64, step: int) -> None:
        """Nothing: the ranking is fixed."""

    @property
    def priority(self) -> NDArray[np.float64]:
        return self._ranking
