"""The KL that the likeliest tokens of two models tell, against that of the whole distributions."""

from __future__ import annotations

from itertools import pairwise

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from numpy.typing import NDArray

from moet.eval.likeliest import Likeliest, kl_lower_bound, same_top1
from moet.eval.served import compare_served

F64 = NDArray[np.float64]
ROUNDING = 5e-6  # nats: float32 probabilities, and what is left of 1


def distributions(seed: int, positions: int, vocabulary: int, spread: float) -> tuple[F64, ...]:
    """Log-probabilities of two models that are somewhat alike: [positions, vocabulary] each."""
    rng = np.random.default_rng(seed)
    common = rng.normal(size=(positions, vocabulary)) * spread
    logits = (common + rng.normal(size=common.shape) for _ in range(2))
    return tuple(of - np.log(np.exp(of).sum(1, keepdims=True)) for of in logits)


def likeliest(logprobs: F64, text: NDArray[np.int64], top: int) -> Likeliest:
    """What vLLM would tell: the text's own token, then the likeliest, in float32."""
    order = np.argsort(-logprobs, axis=1)[:, :top]
    ids = np.concatenate([text[:, None], order], 1)
    told = np.take_along_axis(logprobs, ids, 1).astype(np.float32)
    return Likeliest(ids.astype(np.int32), told.astype(np.float64))


def exact_kl(p: F64, q: F64) -> F64:
    return (np.exp(p) * (p - q)).sum(1)


@given(
    seed=st.integers(0, 2**32 - 1),
    vocabulary=st.integers(2, 90),
    share=st.floats(0, 1),
    spread=st.floats(0, 12),
)
def test_never_above_the_exact_kl(seed: int, vocabulary: int, share: float, spread: float) -> None:
    p, q = distributions(seed, 7, vocabulary, spread)
    text = np.random.default_rng(seed).integers(0, vocabulary, 7)
    top = max(1, round(share * vocabulary))
    told = [likeliest(of, text, top) for of in (p, q)]
    found, exact = kl_lower_bound(*told), exact_kl(p, q)
    assert (found <= exact + ROUNDING).all()
    assert (found >= -ROUNDING).all()
    if top == vocabulary:
        np.testing.assert_allclose(found, exact, atol=ROUNDING)
    assert (same_top1(*told) == (p.argmax(1) == q.argmax(1))).all()


@given(seed=st.integers(0, 2**32 - 1), vocabulary=st.integers(3, 60))
def test_more_tokens_tell_more(seed: int, vocabulary: int) -> None:
    """Of nested sets of tokens the larger has the larger KL; those named twice are nested."""
    p, q = distributions(seed, 5, vocabulary, 3.0)
    text = np.random.default_rng(seed).integers(0, vocabulary, 5)
    found = [
        kl_lower_bound(likeliest(p, text, top), likeliest(q, text, top))
        for top in range(1, vocabulary + 1)
    ]
    assert all((b >= a - ROUNDING).all() for a, b in pairwise(found))


def test_by_hand() -> None:
    """Tokens 0 to 3; the reference names 0 and 1, the candidate 1 and 2, the text is 3."""
    p, q = np.log([[0.5, 0.3, 0.1, 0.1]]), np.log([[0.1, 0.4, 0.3, 0.2]])
    text = np.array([3])
    told = likeliest(p, text, 2), likeliest(q, text, 2)
    assert told[1].ids.tolist() == [[3, 1, 2]]
    expected = 0.3 * np.log(0.3 / 0.4) + 0.1 * np.log(0.1 / 0.2) + 0.6 * np.log(0.6 / 0.4)
    assert kl_lower_bound(*told) == pytest.approx(expected, abs=1e-6)
    assert told[1].nll == pytest.approx(-np.log(0.2), abs=1e-6)
    assert not same_top1(*told).any()


def test_a_model_is_no_distance_from_itself() -> None:
    p, _ = distributions(3, 50, 40, 4.0)
    told = likeliest(p, np.arange(50) % 40, 8)
    assert (kl_lower_bound(told, told) == 0).all()


def test_rows_of_segments_and_their_mean() -> None:
    """Two segments of three windows: means of windows, errors over them, changes paired."""
    windows = [distributions(seed, 6, 30, 2.0) for seed in range(6)]
    text = np.arange(6)
    told = [[likeliest(of[side], text, 30) for of in windows] for side in (0, 1)]
    rows = compare_served(("a", "b"), *told).rows()
    assert [(row.segment, row.tokens) for row in rows] == [("a", 18), ("b", 18), ("mean", 36)]

    kl = np.array([exact_kl(*of).mean() for of in windows])
    loss = [np.array([-of[side][text, text].mean() for of in windows]) for side in (0, 1)]
    second, mean = rows[1], rows[2]
    assert second.kl == pytest.approx(kl[3:].mean(), abs=1e-5)
    assert second.kl_se == pytest.approx(kl[3:].std(ddof=1) / 3**0.5, abs=1e-5)
    assert second.nll_reference == pytest.approx(loss[0][3:].mean(), abs=1e-5)
    assert second.nll == pytest.approx(loss[1][3:].mean(), abs=1e-5)
    change = (loss[1] - loss[0])[3:]
    assert second.nll_change == pytest.approx(change.mean(), abs=1e-5)
    assert second.nll_change_se == pytest.approx(change.std(ddof=1) / 3**0.5, abs=1e-5)
    assert mean.kl == pytest.approx(kl.mean(), abs=1e-5)
    assert mean.kl_se == pytest.approx(np.hypot(rows[0].kl_se, rows[1].kl_se) / 2)
    assert len(compare_served(("a",), *told).rows()) == 1
