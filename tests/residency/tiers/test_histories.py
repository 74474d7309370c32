"""Any sizes, policy, steps, timing, faults, resizes and captures: every promise holds.

The checks are in `sim.SimDevice` and `history.History`; that they can fail is tested here too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from moet.residency.tiers.ensure import Ensure
from moet.residency.tiers.owner import Owner
from moet.residency.tiers.places import Places
from moet.residency.tiers.rows import RowTiers
from moet.residency.tiers.table import TableWriter

from . import history as histories
from .history import History, run_block


@pytest.fixture(autouse=True)
def _quiet_log() -> Iterator[None]:
    """Thousands of failed steps are meant to fail."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("block", range(10))
def test_ten_thousand_histories(block: int) -> None:
    run_block(range(1000 * block, 1000 * (block + 1)))


def test_histories_go_everywhere() -> None:
    """Each thing that can happen does happen, and not in one history only."""
    names = ("promotions", "demotions", "evictions", "read_errors", "failed", "prefetched")
    seen = dict.fromkeys(names, 0)
    resized = captured = 0
    for seed in range(100):
        history = History(seed)
        end_quiet = history._end_quiet

        def count(end_quiet: Callable[[], None] = end_quiet, history: History = history) -> None:
            nonlocal captured
            captured += history.device.capturing
            end_quiet()

        history._end_quiet = count  # type: ignore[method-assign]
        history.run()
        now = history.manager.metrics()
        resized += any(future.exception() is None for future in history.resizes)
        seen["promotions"] += now.promotions > 0
        seen["demotions"] += now.demotions > 0
        seen["evictions"] += now.evictions > 0
        seen["read_errors"] += now.read_errors > 0
        seen["failed"] += now.failed_requests > 0
        seen["prefetched"] += now.prefetched_rows > 0
    assert min(seen.values()) >= 5, seen
    assert resized >= 5
    assert captured >= 5


def _early_epoch(self: Any) -> bool:
    epoch = self._device.begun()
    entries, old = self._entries, self._old
    self._entries, self._old = [], []
    if entries:
        self._device.publish(entries)
    for places, index, row in old:
        places.retire(index, row, epoch)
    return bool(entries)


def _hasty_reclaim(self: Any, done: int, present: object) -> bool:
    indices = list(self._retired)
    self._retired.clear()
    for index in indices:
        self.give(index)
    return bool(indices)


_reclaim = Places.reclaim


def _reclaim_all_in_a_request(self: Any, done: int, present: Any) -> bool:
    return _reclaim(self, done, None if present is None else frozenset())


def _deaf_reclaim(self: Any, done: int, present: Any) -> bool:
    return _reclaim(self, done, None)


def _no_wait(self: Any) -> bool:
    for _, copy in self.moving.values():
        copy.over, copy.done = copy.over, lambda: True
    return _finish_moves(self)


_finish_moves = RowTiers.finish_moves


def _leak(self: Any, index: int, row: int, epoch: int) -> None:
    self.row_in[index] = -1


def _restless(self: Any) -> None:
    for future in self._quiet_wanted:
        self._quiet_held += 1
        future.set_result(None)
    self._quiet_wanted = []


_advance = Ensure.advance


def _always_ready(self: Any, done: int, errors: Any) -> bool:
    _advance(self, done, errors)
    return True


def _no_move_counts(self: Any) -> int:
    return 0


_begin_read = RowTiers.begin_read


def _greedy_read(self: Any, row: int, urgent: bool = False) -> bool:
    return _begin_read(self, row, urgent=True)


MUTATIONS: dict[str, tuple[type, str, Any]] = {
    "the epoch is read before the table changes": (TableWriter, "flush", _early_epoch),
    "a place is reused at once": (Places, "reclaim", _hasty_reclaim),
    "a request frees the places of rows in use": (Places, "reclaim", _reclaim_all_in_a_request),
    "a request frees no places": (Places, "reclaim", _deaf_reclaim),
    "a row is published before its copy ends": (RowTiers, "finish_moves", _no_wait),
    "nothing is pinned": (RowTiers, "pinned", property(lambda self: (), lambda self, rows: None)),
    "retired places are lost": (Places, "retire", _leak),
    "any number of rows may move": (RowTiers, "on_the_way", property(_no_move_counts)),
    "loading takes the last place": (RowTiers, "begin_read", _greedy_read),
    "capture does not wait": (Owner, "_try_quiet", _restless),
    "a request is answered before its rows are there": (Ensure, "advance", _always_ready),
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", MUTATIONS)
def test_histories_find(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rule is needed: without it, some history goes wrong."""
    monkeypatch.setattr(histories, "PATIENCE", 3000)
    monkeypatch.setattr(*MUTATIONS[name], raising=False)
    for seed in range(2500):
        try:
            History(seed).run()
        except Exception:
            return
    pytest.fail("no history has noticed")
