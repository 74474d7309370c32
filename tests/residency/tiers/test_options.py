"""Sizes from budgets, and which are refused."""

from __future__ import annotations

import numpy as np
import pytest

from moet.errors import ConfigError
from moet.formats.layout import Precision
from moet.residency.tiers import TierOptions, TierSizes
from moet.residency.tiers.options import Limits, check_sizes

OWNED = np.ones((4, 16), np.bool_)  # 64 rows


def limits(slots: int, places: int, **options: int) -> Limits:
    return check_sizes(
        Precision.BASE, OWNED, TierSizes(slots, places), 1 << 28, TierOptions(**options)
    )


@pytest.mark.parametrize(
    ("slots", "places", "layer_rows", "least"),
    [
        (0, 17, None, 18),  # all 16 experts of a layer, one on its way, one free place
        (10, 7, None, 8),
        (10, 1, 6, 2),
        (64, 1, None, 2),
        (0, 5, 4, 6),
        (0, 17, 1000, 18),
    ],
)
def test_an_arena_too_small_is_refused_with_the_size_it_needs(
    slots: int, places: int, layer_rows: int | None, least: int
) -> None:
    with pytest.raises(ConfigError, match=f"at least {least} rows .{least / 4:.3g} GiB"):
        limits(slots, places, layer_rows=layer_rows)
    limits(slots, least, layer_rows=layer_rows)


def test_moves_and_streaming_fit_the_arena() -> None:
    assert limits(0, 18) == Limits(moves=1, streaming=9)
    assert limits(16, 40) == Limits(moves=10, streaming=16)
    assert limits(16, 40, layer_rows=4) == Limits(moves=10, streaming=11)
    assert limits(16, 40, max_moves=2, streaming=30) == Limits(moves=2, streaming=20)
    assert limits(40, 40).streaming == 11  # all rows fit


@pytest.mark.parametrize("name", ["plan_every", "max_moves", "io_threads"])
def test_options_that_mean_nothing(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be at least 1, not 0"):
        TierOptions(**{name: 0})
