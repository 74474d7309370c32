"""What a manager promises: sizes, scans, steps, failures, warm starts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moet.errors import ConfigError, PackError, ResidencyError
from moet.formats.layout import Precision
from moet.pack.source import RowKey
from moet.residency.heat import HeatKeeper, load_heat, save_heat
from moet.residency.lease import Wave
from moet.residency.manager import ResidencyManager
from moet.residency.metrics import Phase
from moet.residency.policy import POLICIES

from .sim import (
    BASE,
    FP4,
    ROW_BYTES,
    SimSource,
    check_pools,
    kept_rows,
    resident_rows,
    run_lease,
    uniform,
)


def manager(
    source: SimSource, slots: int, streaming: int = 2, policy: str = "lru", **options: object
) -> ResidencyManager:
    return ResidencyManager(
        source,
        uniform(source),
        {BASE: slots},
        streaming=streaming,
        policy=policy,
        **options,  # type: ignore[arg-type]
    )


def experts(*ids: int, layer: int = 1) -> set[RowKey]:
    return {RowKey(layer, e, BASE) for e in ids}


def test_all_rows_that_fit_are_loaded_once() -> None:
    source, seen = SimSource(), []
    with manager(source, 1000, progress=lambda done, total: seen.append((done, total))) as m:
        assert seen == [(n, 24) for n in range(1, 25)]
        for layer in source.layers:
            assert len(run_lease(m, layer, range(8))) == 1
        counts = m.metrics()
    assert len(source.reads) == 24
    assert counts.hit_rate == 1.0
    assert (counts.pools[BASE].slots, counts.pools[BASE].streaming) == (24, 0)


def test_the_smallest_pool_works_and_a_smaller_one_is_refused() -> None:
    source = SimSource()
    with manager(source, slots=3, streaming=2) as m:
        for layer in source.layers * 3:
            run_lease(m, layer, decode=range(4), scan=range(8))
            check_pools(m)
    for slots in (0, 1, 2):
        with pytest.raises(ConfigError, match="at least 3 slots"):
            manager(source, slots, streaming=2)


def test_a_pool_for_few_rows_needs_no_more_slots_than_rows() -> None:
    source = SimSource()
    precision = uniform(source)
    precision[5][7] = FP4
    with ResidencyManager(source, precision, {BASE: 9, FP4: 1}) as m:
        run_lease(m, 5, decode=range(8))
    with pytest.raises(ConfigError, match=r"mxfp4.*at least 1 slots"):
        ResidencyManager(source, precision, {BASE: 9})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"streaming": 0}, "at least 1"),
        ({"io_threads": 0}, "at least 1"),
        ({"half_life": 0}, "half-life"),
        ({"policy": "fifo"}, "unknown policy 'fifo'"),
        ({"precision": {1: [BASE] * 7}}, "8 experts, and 7"),
        ({"precision": {3: [BASE] * 8}}, "layer 3 is not"),
        ({"precision": {1: [BASE] * 7 + [Precision.NVFP4]}}, "layer 1, expert 7: .* no nvfp4"),
        ({"slots": {BASE: 2**50}, "precision": {1: [BASE] * 8}}, None),
    ],
)
def test_settings_that_cannot_work_are_refused(
    change: dict[str, object], words: str | None
) -> None:
    source = SimSource()
    arguments = {"precision": uniform(source), "slots": {BASE: 12}} | change
    if words is None:  # more slots than rows is not an error
        ResidencyManager(source, **arguments).close()  # type: ignore[arg-type]
        return
    with pytest.raises(ConfigError, match=words):
        ResidencyManager(source, **arguments)  # type: ignore[arg-type]


def test_what_does_not_exist_is_an_error() -> None:
    with manager(SimSource(), 12) as m:
        for layer, decode, scan in ((3, [0], []), (1, [8], []), (1, [], [-1])):
            with (
                pytest.raises(ResidencyError, match=f"layer {layer} "),
                m.lease(layer, decode=decode, scan=scan),
            ):
                pass
        run_lease(m, 1, [0])


def io_threads() -> set[threading.Thread]:
    """Running I/O threads of every manager, those that other tests left to the collector too."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("moet-io")}


def test_one_lease_at_a_time_and_none_after_close() -> None:
    others = io_threads()
    m = manager(SimSource(), 12)
    with m.lease(1, decode=[3, 1], scan=[]) as lease:
        with pytest.raises(ResidencyError, match="a lease is held"), m.lease(2, decode=[], scan=[]):
            pass
        with pytest.raises(ResidencyError, match="a lease is held"):
            m.close()
        assert [e for wave in lease for e in wave.experts] == [1, 3]
    with pytest.raises(ResidencyError, match="after its lease"):
        next(lease)
    m.close()
    m.close()
    with pytest.raises(ResidencyError, match="closed"), m.lease(1, decode=[], scan=[]):
        pass
    assert io_threads() <= others


def test_experts_here_are_used_while_others_are_read() -> None:
    """The reads of a lease begin before its first wave, whose rows are in memory."""
    source = SimSource()
    with manager(source, 12) as m:
        run_lease(m, 1, [0, 1])
        gate = threading.Event()

        def hold() -> float:
            gate.wait(30)
            return 0.0

        source.delay = hold  # no read ends before the gate opens, so no wave may wait for one
        with m.lease(1, decode=[0, 1, 4, 5], scan=[]) as lease:
            assert next(lease).experts.tolist() == [0, 1]
            gate.set()
            assert [e for wave in lease for e in wave.experts] == [4, 5]


def test_the_next_wave_is_read_while_one_is_used() -> None:
    source = SimSource()
    with manager(source, slots=5, streaming=4) as m:

        def during(wave: Wave) -> None:
            following = RowKey(1, int(wave.experts[-1]) + 1, BASE)
            if following.expert < 8:
                deadline = time.monotonic() + 30
                while following not in source.reads:
                    assert time.monotonic() < deadline, f"{following} is not being read"
                    time.sleep(0.0001)

        waves = run_lease(m, 1, [], scan=range(8), during=during)
    assert len(waves) == 4


def test_decode_wins_where_an_expert_is_needed_by_both() -> None:
    source = SimSource()
    with manager(source, 6) as m:
        run_lease(m, 1, decode=[2, 3], scan=[3, 4])
        assert kept_rows(m) == experts(2, 3)
        counts = m.metrics()
    assert counts.misses == {(BASE, Phase.DECODE): 2, (BASE, Phase.SCAN): 1}


def test_a_scan_evicts_nothing_that_decode_keeps() -> None:
    source = SimSource()
    with manager(source, 6) as m:
        run_lease(m, 1, decode=[1, 3, 5, 7])
        kept = kept_rows(m)
        for layer in source.layers * 4:
            run_lease(m, layer, [], scan=range(8))
            assert kept_rows(m) == kept == experts(1, 3, 5, 7)
            assert kept <= resident_rows(m)
        before = len(source.reads)
        run_lease(m, 1, decode=[1, 3, 5, 7])
        assert len(source.reads) == before


def test_a_scan_uses_free_slots_and_decode_takes_its_rows_over_without_reading() -> None:
    source = SimSource()
    with manager(source, 8) as m:
        run_lease(m, 1, [], scan=range(8))
        assert resident_rows(m) == experts(*range(8))
        assert kept_rows(m) == set()
        run_lease(m, 1, decode=[0, 6])
        assert kept_rows(m) == experts(0, 6)
        assert len(source.reads) == 8
        assert m.metrics().promotions == 2


Leases = list[tuple[int, list[int], list[int]]]


def leases() -> st.SearchStrategy[Leases]:
    ids = st.lists(st.integers(0, 7), max_size=6, unique=True)
    one = st.tuples(st.integers(0, 2), ids, st.one_of(ids, st.just(list(range(8)))))
    return st.lists(one, max_size=12)


def replay(
    history: Leases,
    policy: str,
    *,
    scans: bool = True,
    io_threads: int = 1,
    delay: Callable[[], float] | None = None,
) -> tuple[list[set[RowKey]], list[object]]:
    """After each lease: the rows kept, and everything else that was decided."""
    source = SimSource(delay=delay)
    kept, decided = [], []
    with manager(source, 9, policy=policy, half_life=4, io_threads=io_threads) as m:
        for index, decode, scan in history:
            waves = run_lease(m, source.layers[index], decode, scan if scans else [])
            kept.append(kept_rows(m))
            slots = [(table := m.address_table(BASE)) - table[table > 0].min(initial=2**62)]
            counts = m.metrics()
            decided.append(
                (
                    [wave.experts.tolist() for wave in waves],
                    np.where(table > 0, slots[0], -1).tolist(),
                    resident_rows(m),
                    counts.hits,
                    counts.misses,
                    counts.evictions,
                    counts.promotions,
                )
            )
    return kept, decided


@pytest.mark.parametrize("policy", sorted(POLICIES))
@given(leases())
@settings(max_examples=25, deadline=None)
def test_what_decode_keeps_does_not_depend_on_scans(policy: str, history: Leases) -> None:
    assert replay(history, policy)[0] == replay(history, policy, scans=False)[0]


@pytest.mark.parametrize("policy", sorted(POLICIES))
@given(leases(), st.integers(0, 2**32))
@settings(max_examples=15, deadline=None)
def test_decisions_do_not_depend_on_timing(policy: str, history: Leases, seed: int) -> None:
    pace = Random(seed)
    slow = replay(history, policy, io_threads=4, delay=lambda: pace.choice((0, 0.0005)))
    assert slow == replay(history, policy)


def test_a_row_that_cannot_be_read_fails_its_lease_only() -> None:
    source = SimSource()
    with manager(source, 6) as m:
        source.broken = {RowKey(1, 3, BASE)}
        with pytest.raises(PackError, match="layer 1, expert 3") as caught:
            run_lease(m, 1, decode=[0, 2, 3, 4])
        assert caught.value is source.raised[0]
        check_pools(m)
        assert RowKey(1, 3, BASE) not in resident_rows(m)
        assert kept_rows(m) == experts(0, 2, 4)  # the rows beside it arrived
        with pytest.raises(PackError):
            run_lease(m, 1, decode=[3])
        source.broken = set()
        run_lease(m, 1, decode=[0, 2, 3, 4])
        assert m.metrics().read_errors == 2


def test_a_failed_lease_hands_out_nothing_more() -> None:
    source = SimSource()
    with manager(source, 6) as m:
        source.broken = {RowKey(1, 0, BASE)}
        with m.lease(1, decode=[0, 1, 2, 3], scan=[]) as lease:
            for _ in range(2):
                with pytest.raises(PackError):
                    next(lease)
        check_pools(m)


def test_a_row_that_cannot_be_read_stops_the_start() -> None:
    others = io_threads()
    source = SimSource()
    source.broken = {RowKey(2, 4, BASE)}
    with pytest.raises(PackError, match="layer 2, expert 4"):
        manager(source, 24)
    assert io_threads() <= others


def test_steps_follow_the_layers() -> None:
    source = SimSource()
    with manager(source, 23) as m:
        for step in range(4):
            for layer in source.layers:
                run_lease(m, layer, [0, step // 2])
            run_lease(m, source.layers[-1], [0])  # a draft layer runs more than once
        assert m.metrics().steps == 3
    counts = m.metrics()
    assert counts.steps == 4
    assert counts.steps_without_miss == 2
    assert counts.disk_bytes == 6 * ROW_BYTES[BASE]
    assert counts.stall_seconds > 0


def test_address_tables_are_read_only() -> None:
    with manager(SimSource(), 24) as m, pytest.raises(ValueError, match="read-only"):
        m.address_table(BASE)[0, 0] = 1


def decode_steps(m: ResidencyManager, source: SimSource, ids: list[int], steps: int) -> None:
    for _ in range(steps):
        for layer in source.layers:
            run_lease(m, layer, ids)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_warm_start_loads_the_hottest_rows(policy: str, tmp_path: Path) -> None:
    source, path = SimSource(), tmp_path / "heat.safetensors"
    with manager(source, 12, heat_path=path, policy=policy) as m:
        decode_steps(m, source, [6, 7], 40)
        run_lease(m, 1, [0, 1, 2])
    seen: list[int] = []
    with manager(
        source, 10, heat_path=path, policy=policy, progress=lambda done, _: seen.append(done)
    ) as m:
        hot = {RowKey(layer, e, BASE) for layer in source.layers for e in (6, 7)}
        assert hot | experts(0) <= kept_rows(m) == resident_rows(m)
        assert seen == list(range(1, 9))  # 10 slots, 2 of them streaming
        run_lease(m, 5, [6, 7])
        assert m.metrics().hit_rate == 1.0
        for layer in source.layers * 2:  # colder rows are given up first
            run_lease(m, layer, [4])
        assert experts(6, 7, layer=5) <= kept_rows(m)


def test_a_short_run_leaves_the_heat_file_alone(tmp_path: Path) -> None:
    source, path = SimSource(), tmp_path / "heat.safetensors"
    save_heat(path, "another pack", (1, 2), np.ones((2, 2), np.float32))
    before = path.read_bytes()
    with manager(source, 12, heat_path=path) as m:
        assert not resident_rows(m)
        decode_steps(m, source, [1], HeatKeeper.WARM_STEPS - 1)
        for layer in source.layers * 100:  # prefill alone is no heat
            run_lease(m, layer, [], scan=[2])
    assert path.read_bytes() == before
    with manager(source, 12, heat_path=path) as m:
        decode_steps(m, source, [1], HeatKeeper.WARM_STEPS)
    assert load_heat(path, source.identity, source.layers, 8) is not None


def test_heat_is_written_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HeatKeeper, "SAVE_EVERY", 40)
    source, path = SimSource(), tmp_path / "heat.safetensors"
    m = manager(source, 12, heat_path=path, io_threads=1)
    decode_steps(m, source, [1], 41)
    run_lease(m, 1, [5])  # the one I/O thread reads this row after the file is written
    counts = load_heat(path, source.identity, source.layers, 8)
    assert counts is not None
    assert (counts[:, 1] > 38).all()
    assert counts[:, 5].max() == 0
    m.close()


def test_a_heat_file_that_cannot_be_written_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = SimSource()
    m = manager(source, 12, heat_path=tmp_path / "missing" / "heat.safetensors")
    decode_steps(m, source, [1], HeatKeeper.WARM_STEPS)
    m.close()
    assert "cannot be written" in caplog.text
