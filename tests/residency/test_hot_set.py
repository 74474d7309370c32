"""The adaptive hot set: the hottest experts at FP4, changed at fixed steps and with hysteresis."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moet.errors import ConfigError, ResidencyError
from moet.pack.source import RowKey
from moet.residency.hot_set import HotSetOptions, exchange
from moet.residency.manager import ResidencyManager

from .sim import BASE, FP4, SimSource, check_pools, run_lease, uniform

EVERY = 4


def manager(source: SimSource, fp4: int, base: int = 24, **options: object) -> ResidencyManager:
    return ResidencyManager(
        source,
        options.pop("precision", uniform(source)),  # type: ignore[arg-type]
        {BASE: base, FP4: fp4},
        recovery=dict.fromkeys(source.layers, FP4),
        hot_set=HotSetOptions(every=EVERY, margin=1.5),
        streaming=2,
        **options,  # type: ignore[arg-type]
    )


def step(m: ResidencyManager, experts: list[int]) -> set[RowKey]:
    """One decode step of all layers; the rows of layer 1 that it read."""
    used = set()
    for layer in m.layers:
        for wave in run_lease(m, layer, experts):
            if layer == 1:
                keys = zip(wave.experts.tolist(), wave.precision, strict=True)
                used |= {RowKey(1, expert, precision) for expert, precision in keys}
    assert m.hot_set is not None
    if not m.hot_set._arriving:  # whose slots are neither idle nor kept
        check_pools(m)
    return used


def hot(used: set[RowKey]) -> set[int]:
    return {key.expert for key in used if key.precision == FP4}


def test_joins_two_decisions_after_it_became_hot() -> None:
    with manager(SimSource(), 6) as m:
        seen = [hot(step(m, [2, 5])) for _ in range(3 * EVERY)]
    # Steps 0 to 3 are counted, read from step 4 on, used from step 8 on.
    assert seen == [set()] * 2 * EVERY + [{2, 5}] * EVERY


def test_another_expert_takes_over_only_if_it_is_hotter_by_the_margin() -> None:
    with manager(SimSource(layers=(1,)), 1) as m:
        for _ in range(3 * EVERY):
            used = step(m, [2])
        assert hot(used) == {2}
        for _ in range(5 * EVERY):  # as hot by then, not hotter by the margin
            used = step(m, [2, 3])
        assert hot(used) == {2}
        for _ in range(10 * EVERY):
            used = step(m, [3])
        assert hot(used) == {3}
        assert m.hot_set is not None
        assert (m.hot_set.size, m.hot_set.exchanges) == (1, 1)


def test_disk_latency_changes_no_decision() -> None:
    runs = []
    for delay in (None, lambda: 0.003):
        with manager(SimSource(delay=delay), 5, base=5) as m:
            rng = np.random.default_rng(0)
            runs.append([step(m, sorted(set(rng.integers(0, 8, 3).tolist()))) for _ in range(60)])
    assert runs[0] == runs[1]
    assert any(hot(used) for used in runs[0])


def test_a_row_that_cannot_be_read_does_not_join() -> None:
    source = SimSource()
    source.broken = {RowKey(1, 2, FP4)}
    with manager(source, 6) as m:
        for _ in range(4 * EVERY):
            used = step(m, [2, 5])
        assert hot(used) == {5}
        assert m.metrics().read_errors > 0


def test_refusals() -> None:
    source = SimSource()
    precision = {layer: [FP4, *[BASE] * 7] for layer in source.layers}
    with pytest.raises(ConfigError, match="all experts at base"):
        manager(source, 6, precision=precision)
    with (
        manager(source, 6) as m,
        pytest.raises(ResidencyError, match="recovery"),
        m.lease(1, decode=[0], scan=[], recovery=True),
    ):
        pass


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=12), st.data(), st.integers(0, 6))
def test_an_exchange_fills_the_places_and_goes_by_heat(
    counts: list[int], data: st.DataObject, capacity: int
) -> None:
    heat = np.full(len(counts), -np.inf)
    np.log2(counts, out=heat, where=np.array(counts) > 0)
    members = np.zeros(len(counts), np.bool_)
    chosen = data.draw(st.lists(st.integers(0, len(counts) - 1), max_size=capacity, unique=True))
    members[chosen] = True
    leaving, joining = exchange(heat, members, capacity, float(np.log2(1.5)))
    after = members.copy()
    after[leaving], after[joining] = False, True
    assert members[leaving].all()
    assert not members[joining].any()
    wanted = sum(1 for row, count in enumerate(counts) if count or members[row])
    assert after.sum() == min(capacity, wanted)
    outside = [counts[row] for row in np.flatnonzero(~after)]
    inside = [counts[row] for row in np.flatnonzero(after)]
    if inside and outside:
        assert max(outside) <= max(1.5 * min(inside), 0)
