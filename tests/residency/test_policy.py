"""Which rows the policies keep."""

from __future__ import annotations

import numpy as np
import pytest

from moet.residency.heat import Heat
from moet.residency.policy import POLICIES, Policy


class Keeper:
    """The pool's part: keeps what the policy says, at most `capacity` rows of one layer."""

    def __init__(self, name: str, capacity: int, heat: list[float], half_life: float = 4) -> None:
        self.heat = Heat(np.array([heat]), half_life)
        self.policy: Policy = POLICIES[name](self.heat)
        self.capacity, self.kept = capacity, set[int]()

    def step(self, number: int, *experts: int) -> set[int]:
        ids = np.array(sorted(experts), np.int64)
        self.heat.touch(0, ids, number)
        self.policy.touch(0, ids, number)
        kept = np.array(sorted(self.kept), np.int64)
        candidates = np.array([e for e in ids if e not in self.kept], np.int64)
        room = self.capacity - len(kept)
        admitted, victims = self.policy.admit(candidates, kept, room)
        assert set(victims) <= self.kept
        assert set(admitted) <= set(candidates.tolist())
        assert len(self.kept) - len(victims) + len(admitted) <= self.capacity
        self.kept = (self.kept - set(victims.tolist())) | set(admitted.tolist())
        return self.kept


def test_lru_gives_up_what_was_used_longest_ago() -> None:
    keeper = Keeper("lru", 3, [0.0] * 8)
    assert keeper.step(0, 1, 2, 3) == {1, 2, 3}
    keeper.step(1, 1)
    keeper.step(2, 3)
    assert keeper.step(3, 4) == {1, 3, 4}
    assert keeper.step(4, 5) == {3, 4, 5}


def test_lru_does_not_trade_rows_of_one_step_for_each_other() -> None:
    keeper = Keeper("lru", 2, [0.0] * 8)
    assert keeper.step(0, 1, 2, 3, 4) == {1, 2}
    assert keeper.step(1, 3, 4, 5) == {3, 4}


def test_lru_starts_with_the_order_of_the_heat() -> None:
    keeper = Keeper("lru", 3, [0, 5, 1, 9, 0])
    keeper.kept = {1, 2, 3}
    assert keeper.step(0, 4) == {1, 3, 4}
    assert keeper.step(1, 0) == {0, 3, 4}


def test_lfu_keeps_what_is_used_often() -> None:
    keeper = Keeper("lfu", 2, [0.0] * 8, half_life=100)
    for number in range(10):
        keeper.step(number, 1, 2)
    for number, expert in enumerate((3, 4, 5, 6), 10):
        assert keeper.step(number, expert) == {1, 2}


def test_lfu_forgets() -> None:
    keeper = Keeper("lfu", 1, [0.0] * 8, half_life=2)
    for number in range(10):
        keeper.step(number, 1)
    assert keeper.step(10, 2) == {1}
    assert keeper.step(20, 2) == {2}  # 2^−5 of the weight of 1 is left


def test_lfu_prefers_the_more_frequent_of_two_candidates() -> None:
    keeper = Keeper("lfu", 1, [0, 1, 4, 2])
    keeper.kept = {1}
    assert keeper.step(0, 2, 3) == {2}


def test_static_keeps_the_ranking() -> None:
    keeper = Keeper("static", 2, [1, 8, 2, 9, 0])
    keeper.kept = {1, 3}
    for number in range(50):
        assert keeper.step(number, 0, 2, 4) == {1, 3}


def test_static_brings_back_what_ranks_higher() -> None:
    keeper = Keeper("static", 2, [1, 8, 2, 9, 0])
    assert keeper.step(0, 0, 4) == {0, 4}
    assert keeper.step(1, 1, 2) == {1, 2}
    assert keeper.step(2, 3) == {1, 3}


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_ties_go_to_what_is_kept(name: str) -> None:
    heat = Heat(np.zeros((1, 6)), 1)
    policy = POLICIES[name](heat)
    admitted, victims = policy.admit(np.array([4, 5]), np.array([0, 1]), 1)
    assert (admitted.tolist(), victims.tolist()) == ([4], [])


def test_the_coldest_victims_are_found_among_many() -> None:
    rng = np.random.default_rng(0)
    heat = Heat(rng.integers(1, 20, (1, 300)).astype(float), 10)
    policy = POLICIES["lfu"](heat)
    rows = np.arange(300)
    kept, candidates = rows[:250], rows[250:]
    admitted, victims = policy.admit(candidates, kept, 7)
    priority = heat.log[0]
    order = sorted(candidates, key=lambda r: (-priority[r], r))
    coldest = sorted(kept, key=lambda r: (priority[r], r))
    pairs = list(zip(order[7:], coldest, strict=False))
    wins = sum(priority[new] > priority[old] for new, old in pairs)
    assert 0 < wins < 43
    assert admitted.tolist() == order[: 7 + wins]
    assert victims.tolist() == coldest[:wins]
