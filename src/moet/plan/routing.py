"""Which experts tokens want, and how often they are among those that are resident.

The model has one number, the *spread* s: with a layer's E experts in the order of their popularity,
the share of routings that go to the first c·E of them is

    h(c) = (1 − exp(−c / s)) / (1 − exp(−1 / s))

s → ∞ is routing without preference, and a small s routing that stays in a small hot set. Published
pairs: 19 % → 96 % on DeepSeek-V4-Flash (s = 0.059), 51 % → 91 % on GLM-5.2 (s = 0.22). A pool is
taken to hold each layer's most popular experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# A spread that is as good as no preference at all.
EVEN = 1e3


def popularity(experts: int, top_k: int, spread: float) -> Floats:
    """The probability that a token wants each expert of a layer, descending; sums to `top_k`.

    A token wants an expert once, so what the curve gives an expert beyond 1 goes to the others.
    """
    # The curve falls by the same factor from expert to expert.
    falling = np.exp(-np.arange(experts) / (experts * spread))
    wanted = np.ones(experts)
    for always in range(top_k):  # how many experts are wanted by every token
        rest = falling[: experts - always]
        wanted[always:] = (top_k - always) * rest / rest.sum()
        if wanted[always] <= 1:
            break
        wanted[always] = 1
    else:
        wanted[top_k:] = 0
    return wanted


def measured_popularity(experts: int, top_k: int, points: Sequence[tuple[float, float]]) -> Floats:
    """As `popularity`, for routing of which some points of the curve are known: pairs of (share of
    the experts, share of the routings that go to them), ascending; straight between them."""
    shares, routings = zip((0.0, 0.0), *points, (1.0, 1.0), strict=True)
    curve = np.interp(np.arange(experts + 1) / experts, shares, routings)
    wanted = np.sort(np.diff(curve))[::-1] * top_k
    while (over := wanted > 1).any():  # as in `popularity`, until nobody is wanted too much
        rest = wanted[~over].sum()
        if not rest:
            break
        wanted[~over] *= (top_k - over.sum()) / rest
        wanted[over] = 1
    return np.asarray(np.minimum(wanted, 1.0))


def hit_rate(wanted: Floats, coverage: float) -> float:
    """The share of routings that find their expert, with the share `coverage` of them resident."""
    return float(1 - _beyond(wanted, coverage) / wanted.sum())


def distinct_experts(wanted: Floats, tokens: int) -> float:
    """The number of experts of one layer that `tokens` tokens read together."""
    return float(_read(wanted, tokens).sum())


def missing_experts(wanted: Floats, coverage: float, tokens: int) -> float:
    """How many of these are not resident, on average."""
    return _beyond(_read(wanted, tokens), coverage)


def row_chances(rows: float, missing: float) -> Floats:
    """Probabilities of 0, 1, 2 … missing rows among `rows`, if `missing` are on average.

    Rows are taken to miss independently.
    """
    trials = max(1, round(rows))
    return _binomial(trials, min(1.0, missing / trials))


def _read(wanted: Floats, tokens: int) -> Floats:
    """The probability that at least one of `tokens` tokens wants each expert."""
    return np.asarray(-np.expm1(tokens * np.log1p(-np.minimum(wanted, 1 - 1e-12))))


def _beyond(values: Floats, coverage: float) -> float:
    """The sum over the experts that are not among the first `coverage` of them."""
    if not 0 <= coverage <= 1:
        raise ValueError(f"coverage {coverage} is not in [0, 1]")
    place = coverage * len(values)
    whole = int(place)
    rest = float(values[whole:].sum())
    if whole < len(values):
        rest -= (place - whole) * float(values[whole])
    return max(0.0, rest)


def _binomial(trials: int, probability: float) -> Floats:
    """P(0 … trials successes)."""
    if probability <= 0 or probability >= 1:
        exact = np.zeros(trials + 1)
        exact[trials if probability >= 1 else 0] = 1.0
        return exact
    counts = np.arange(1, trials + 1)
    steps = np.log((trials - counts + 1) / counts) + np.log(probability / (1 - probability))
    logs = np.concatenate(([0.0], np.cumsum(steps))) + trials * np.log1p(-probability)
    weights = np.exp(logs)
    return np.asarray(weights / weights.sum())
