"""The adaptive hot set of tiers: who joins and when, and rows fetched beside the steps."""

from __future__ import annotations

import numpy as np
import pytest

from moet.residency.hot_set import HotSetOptions
from moet.residency.tiers.hot import TierHotSet


class Fetched:
    """Notes what is asked for; `broken` rows cannot be read."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []
        self.broken: set[int] = set()

    def __call__(self, rows: list[int], failed: set[int]) -> None:
        self.asked.append(rows)
        failed |= self.broken & set(rows)


@pytest.fixture
def fetched() -> Fetched:
    return Fetched()


def made(fetched: Fetched, capacity: int = 2) -> TierHotSet:
    return TierHotSet((2, 4), HotSetOptions(4, 1.5), capacity, fetched)


def use(**counts: int) -> np.ndarray:
    """use(e5=3): of row 5, three times."""
    found = np.zeros(8, np.int64)
    for name, count in counts.items():
        found[int(name[1:])] = count
    return found.reshape(2, 4)


def rows(hot: TierHotSet) -> list[int]:
    return np.flatnonzero(hot.members).tolist()


def test_the_hottest_join_at_the_next_decision(fetched: Fetched) -> None:
    hot = made(fetched)
    hot.decide(use(e5=3, e1=2, e0=1), 4)
    assert fetched.asked == [[5, 1]]
    assert rows(hot) == []
    hot.decide(use(), 8)
    assert rows(hot) == [1, 5]
    assert hot.size == 2


def test_a_member_goes_for_one_that_is_hotter_by_the_margin(fetched: Fetched) -> None:
    hot = made(fetched)
    hot.decide(use(e5=4, e1=4), 4)
    hot.decide(use(e3=5), 8)  # not by half as much
    assert rows(hot) == [1, 5]
    hot.decide(use(e3=4), 12)
    assert rows(hot) == [5]
    hot.decide(use(), 16)
    assert rows(hot) == [3, 5]
    assert hot.exchanges == 1


def test_rows_that_cannot_be_read_do_not_join(fetched: Fetched) -> None:
    hot = made(fetched)
    fetched.broken = {5}
    hot.decide(use(e5=3, e1=2), 4)
    hot.decide(use(), 8)
    assert rows(hot) == [1]
    assert fetched.asked[-1] == [5]  # asked for again
    fetched.broken = set()
    hot.decide(use(), 12)
    hot.decide(use(), 16)
    assert rows(hot) == [1, 5]


def test_a_smaller_pool_keeps_the_hottest(fetched: Fetched) -> None:
    hot = made(fetched, 3)
    hot.decide(use(e5=3, e1=2, e0=4), 4)
    hot.decide(use(), 8)
    hot.capacity = 1
    hot.decide(use(), 12)
    assert rows(hot) == [0]
