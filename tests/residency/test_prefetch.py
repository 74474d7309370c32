"""Rows read before their lease, by the CPU's manager. Random ones are in test_histories.py."""

from __future__ import annotations

import pytest

from moet.errors import PackError, ResidencyError
from moet.pack.source import RowKey
from moet.residency.manager import ResidencyManager

from .sim import BASE, SimSource, check_pools, coming_rows, resident_rows, run_lease, uniform


def make(source: SimSource, slots: int = 10, streaming: int = 6) -> ResidencyManager:
    return ResidencyManager(source, uniform(source), {BASE: slots}, streaming=streaming)


def keys(*rows: tuple[int, int]) -> set[RowKey]:
    return {RowKey(layer, expert, BASE) for layer, expert in rows}


def test_leases_take_over_what_was_read_ahead() -> None:
    source = SimSource()
    with make(source) as m:
        m.prefetch({2: [3], 1: [0, 1], 7: [0]})  # 7: another rank's
        ahead = keys((1, 0), (1, 1), (2, 3))
        assert coming_rows(m) == set(source.reads) == ahead
        assert resident_rows(m) == set()
        run_lease(m, 1, [0], [1, 2])
        assert coming_rows(m) == keys((2, 3))
        run_lease(m, 2, [3])
        assert len(source.reads) == 4
        assert resident_rows(m) == ahead | keys((1, 2))
        now = m.metrics()
        assert (now.prefetched_rows, sum(now.misses.values())) == (3, 4)
        m.prefetch({1: [0, 1]})  # in memory
        assert m.metrics().prefetched_rows == 3
        check_pools(m)


def test_as_many_as_leave_room_for_a_lease() -> None:
    """The others follow when a lease has begun all its reads."""
    source = SimSource()
    with make(source, slots=8, streaming=4) as m:
        m.prefetch({1: [0, 1], 2: [2, 3, 4], 5: [7]})
        assert coming_rows(m) == keys((1, 0), (1, 1), (2, 2))
        run_lease(m, 1, [0, 1])
        assert coming_rows(m) == keys((2, 2), (2, 3), (2, 4))
        run_lease(m, 2, [2, 3, 4])
        assert coming_rows(m) == keys((5, 7))
        check_pools(m)


def test_what_the_lease_reads_is_not_read_ahead_too() -> None:
    source = SimSource()
    with make(source, slots=8, streaming=3) as m:
        m.prefetch({1: range(6)})
        assert coming_rows(m) == keys((1, 0), (1, 1))
        run_lease(m, 1, [], range(6))
        assert sorted(source.reads) == sorted(keys(*((1, e) for e in range(6))))
        check_pools(m)


def test_a_row_that_cannot_be_read_fails_its_lease_only() -> None:
    source = SimSource()
    source.broken = keys((2, 3))
    with make(source) as m:
        m.prefetch({1: [0], 2: [3, 4]})
        run_lease(m, 1, [0])
        with pytest.raises(PackError, match="layer 2, expert 3"):
            run_lease(m, 2, [3, 4])
        check_pools(m)
        m.prefetch({1: [1], 2: [3]})
        run_lease(m, 1, [1])
        run_lease(m, 2, [4])  # does not use it
        source.broken = set()
        run_lease(m, 2, [3])
        assert m.metrics().read_errors == 2
        check_pools(m)


def test_what_no_lease_uses_is_given_up() -> None:
    source = SimSource()
    with make(source) as m:
        m.prefetch({1: [0], 2: [3], 5: [4]})
        run_lease(m, 2, [1])  # not what was foreseen
        assert coming_rows(m) == keys((1, 0), (5, 4))
        assert resident_rows(m) == keys((2, 1), (2, 3))
        m.prefetch({})
        assert coming_rows(m) == set()
        check_pools(m)


def test_not_during_a_lease_and_no_experts_that_do_not_exist() -> None:
    with make(SimSource()) as m:
        with pytest.raises(ResidencyError, match="experts 0 to 7, not 8"):
            m.prefetch({1: [8]})
        with m.lease(1, decode=[0], scan=[]), pytest.raises(ResidencyError, match="lease is held"):
            m.prefetch({1: [0]})
    with pytest.raises(ResidencyError, match="after the manager was closed"):
        m.prefetch({1: [0]})
