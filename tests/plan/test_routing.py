"""The routing model: what it must satisfy whatever its exponent is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moet.plan.routing import distinct_experts, hit_rate, missing_rows

SIZES = st.tuples(st.integers(2, 512), st.integers(1, 16), st.integers(1, 256)).filter(
    lambda size: size[1] <= size[0]
)


def test_hit_rate_has_the_published_points() -> None:
    assert hit_rate(0.19, 0.0246) == pytest.approx(0.96, abs=1e-3)
    assert hit_rate(0.51, 0.14) == pytest.approx(0.91, abs=1e-3)
    assert (hit_rate(0, 0.1), hit_rate(1, 0.1)) == (0, 1)
    with pytest.raises(ValueError, match="coverage"):
        hit_rate(1.01, 0.1)


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0.01, 1))
def test_more_coverage_never_hits_less(one: float, other: float, exponent: float) -> None:
    low, high = sorted((one, other))
    assert 0 <= hit_rate(low, exponent) <= hit_rate(high, exponent) <= 1


@given(SIZES)
def test_distinct_experts_are_bounded(size: tuple[int, int, int]) -> None:
    experts, top_k, tokens = size
    found = distinct_experts(experts, top_k, tokens)
    assert top_k - 1e-6 <= found <= min(experts, top_k * tokens) + 1e-6


def test_distinct_experts_are_what_random_routing_reads() -> None:
    # bench/results/kernels-h200.json: 16 tokens, 6 of 256 experts each, read 80 to 82.
    assert distinct_experts(256, 6, 16) == pytest.approx(81, abs=1)


@settings(max_examples=60)
@given(SIZES, st.floats(0, 1))
def test_missing_rows_are_a_distribution(size: tuple[int, int, int], hit: float) -> None:
    chance = missing_rows(*size, hit)
    experts, top_k, tokens = size
    rows = len(chance) - 1
    assert chance.min() >= 0
    assert chance.sum() == pytest.approx(1)
    mean = chance @ np.arange(rows + 1)
    assert mean == pytest.approx(min(rows, tokens * top_k * (1 - hit)), rel=1e-6, abs=1e-9)
    assert rows <= min(experts, max(top_k, tokens * top_k))
    assert missing_rows(*size, 1.0)[0] == 1
