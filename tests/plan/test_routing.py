"""The routing model: what it must satisfy whatever its spread is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moet.plan.routing import (
    EVEN,
    distinct_experts,
    hit_rate,
    measured_popularity,
    missing_experts,
    popularity,
    row_chances,
)

WANTED = st.builds(
    popularity, st.integers(16, 512), st.integers(1, 16), st.floats(0.005, 10)
)  # fmt: skip


def test_hit_rate_has_the_published_points() -> None:
    assert hit_rate(popularity(256, 6, 0.059), 0.19) == pytest.approx(0.96, abs=5e-3)
    assert hit_rate(popularity(256, 8, 0.22), 0.51) == pytest.approx(0.91, abs=5e-3)


@settings(max_examples=60)
@given(st.integers(16, 512), st.integers(1, 8), st.floats(0.02, 0.9), st.floats(0, 1))
def test_measured_routing_is_kept(experts: int, top_k: int, share: float, more: float) -> None:
    """A point on the curve, above the diagonal."""
    routings = share + more * (1 - share)
    wanted = measured_popularity(experts, top_k, [(share, routings)])
    assert wanted.max() <= 1
    assert (np.diff(wanted) <= 1e-12).all()
    if top_k * routings / (share * experts) <= 1:  # else not every token can want one of these
        assert wanted.sum() == pytest.approx(top_k)
        assert hit_rate(wanted, share) == pytest.approx(routings, abs=1 / (share * experts))


@settings(max_examples=60)
@given(WANTED, st.floats(0, 1), st.floats(0, 1), st.integers(1, 200))
def test_more_coverage_never_misses_more(
    wanted: np.ndarray, one: float, other: float, tokens: int
) -> None:
    low, high = sorted((one, other))
    assert 0 <= hit_rate(wanted, low) <= hit_rate(wanted, high) + 1e-12 <= 1 + 1e-9
    assert missing_experts(wanted, high, tokens) <= missing_experts(wanted, low, tokens)
    assert missing_experts(wanted, 1, tokens) == 0
    everything = distinct_experts(wanted, tokens)
    assert missing_experts(wanted, 0, tokens) == pytest.approx(everything)


@settings(max_examples=60)
@given(st.integers(16, 512), st.integers(1, 16), st.floats(0.005, 10))
def test_popularity_is_one_of_top_k(experts: int, top_k: int, spread: float) -> None:
    wanted = popularity(experts, top_k, spread)
    assert wanted.sum() == pytest.approx(top_k)
    assert wanted.max() <= 1 + 1e-12
    assert wanted.min() >= 0
    assert (np.diff(wanted) <= 1e-12).all()


@settings(max_examples=60)
@given(WANTED, st.integers(1, 200))
def test_distinct_experts_are_bounded(wanted: np.ndarray, tokens: int) -> None:
    found = distinct_experts(wanted, tokens)
    top_k = wanted.sum()
    assert top_k - 1e-6 <= found <= min(len(wanted), top_k * tokens) + 1e-6
    even = popularity(len(wanted), round(float(top_k)), EVEN)
    assert found <= distinct_experts(even, tokens) + 1e-3


def test_distinct_experts_are_what_random_routing_reads() -> None:
    # bench/results/kernels-h200.json: 16 tokens, 6 of 256 experts each, read 80 to 82.
    assert distinct_experts(popularity(256, 6, EVEN), 16) == pytest.approx(81, abs=1)


def test_a_simulated_router_reads_as_many() -> None:
    wanted = popularity(64, 4, 0.2)
    rng = np.random.default_rng(0)
    # Independent draws: a router's are of exactly four, which the mean does not depend on.
    drawn = (rng.random((2000, 8, 64)) < wanted).any(axis=1)
    assert distinct_experts(wanted, 8) == pytest.approx(drawn.sum(axis=1).mean(), rel=0.02)
    missing = drawn[:, 32:].sum(axis=1).mean()
    assert missing_experts(wanted, 0.5, 8) == pytest.approx(missing, rel=0.1)


@given(st.integers(1, 300), st.floats(0, 1))
def test_row_chances_are_a_distribution(rows: int, share: float) -> None:
    chance = row_chances(rows, share * rows)
    assert chance.min() >= 0
    assert chance.sum() == pytest.approx(1)
    assert chance @ np.arange(rows + 1) == pytest.approx(share * rows, rel=1e-6, abs=1e-9)


def test_impossible_coverage_is_refused() -> None:
    with pytest.raises(ValueError, match="coverage"):
        hit_rate(popularity(8, 2, 1.0), 1.01)
