"""Experts with rows of two precisions: recovery's leases beside those of each expert's own."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moet.errors import ConfigError, ResidencyError
from moet.pack.source import RowKey
from moet.residency.manager import ResidencyManager

from .sim import (
    BASE,
    FP4,
    SimSource,
    check_pools,
    check_row,
    kept_rows,
    resident_rows,
    run_lease,
    uniform,
)


def manager(source: SimSource, base: int, fp4: int, **options: object) -> ResidencyManager:
    return ResidencyManager(
        source,
        options.pop("precision", uniform(source)),  # type: ignore[arg-type]
        {BASE: base, FP4: fp4},
        recovery=dict.fromkeys(source.layers, FP4),
        streaming=2,
        **options,  # type: ignore[arg-type]
    )


def lease_again(m: ResidencyManager, layer: int, experts: list[int]) -> None:
    with m.lease(layer, decode=experts, scan=[], recovery=True) as lease:
        for wave in lease:
            assert set(wave.precision) == {FP4}
            for expert, address in zip(wave.experts.tolist(), wave.address.tolist(), strict=True):
                check_row(address, RowKey(layer, expert, FP4))


def test_an_expert_has_a_row_of_each_precision() -> None:
    source = SimSource()
    with manager(source, 1000, 1000) as m:
        assert len(resident_rows(m)) == 2 * 24
        run_lease(m, 1, range(8))
        lease_again(m, 1, [0, 3])
        assert m.address_table(BASE)[0, 3] != m.address_table(FP4)[0, 3]
        run_lease(m, 2, [1])
        run_lease(m, 1, [1])
    assert m.metrics().steps == 2, "a lease of recovery began a step"


def test_an_expert_that_runs_at_fp4_anyway_has_one_row() -> None:
    source = SimSource()
    precision = {layer: [FP4, *[BASE] * 7] for layer in source.layers}
    with manager(source, 1000, 1000, precision=precision) as m:
        assert len(resident_rows(m)) == 3 * (7 + 8)
        run_lease(m, 1, [0, 1])
        lease_again(m, 1, [0, 1])


def test_what_recovery_keeps_is_what_recovery_uses() -> None:
    source = SimSource()
    with manager(source, 24, 4) as m:
        run_lease(m, 1, [0, 1])
        lease_again(m, 1, [0, 1])
        run_lease(m, 1, [0, 1])  # keeps the base's rows warm, not recovery's
        lease_again(m, 1, [2, 3])
        kept = {key.expert for key in kept_rows(m) if key.precision == FP4}
        assert kept == {2, 3}


def test_refusals() -> None:
    source = SimSource()
    with (
        ResidencyManager(source, uniform(source), {BASE: 24}) as m,
        pytest.raises(ResidencyError, match="recovery"),
        m.lease(1, decode=[0], scan=[], recovery=True),
    ):
        pass
    with pytest.raises(ConfigError, match="too small"):
        manager(source, 24, 2)
    with pytest.raises(ConfigError, match="layer 9"):
        ResidencyManager(source, {9: [BASE] * 8}, {BASE: 24}, recovery={9: FP4})


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([1, 2, 5]),
            st.booleans(),
            st.lists(st.integers(0, 7), min_size=1, unique=True),
        ),
        max_size=12,
    ),
    st.integers(3, 9),
    st.integers(3, 9),
    st.sampled_from(["lru", "lfu", "static"]),
)
def test_any_order_of_leases(
    turns: list[tuple[int, bool, list[int]]], base: int, fp4: int, policy: str
) -> None:
    with manager(SimSource(), base, fp4, policy=policy) as m:
        for layer, recovery, experts in turns:
            if recovery:
                lease_again(m, layer, sorted(experts))
            else:
                run_lease(m, layer, sorted(experts))
            check_pools(m)
