"""Statistics against their definitions in plain float64, and that they add up."""

from __future__ import annotations

import json
import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moet.quantize import (
    QUANTIZERS,
    MatrixContext,
    MatrixStatistics,
    TwoBitMatrix,
    matrix_statistics,
    merge_statistics,
)

E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)


def _some(rng: np.random.Generator, rows: int, k: int) -> tuple[np.ndarray, TwoBitMatrix]:
    """Weights and a base that need not fit them; zero blocks among them."""
    weight = rng.standard_normal((rows, k)).astype(np.float32)
    weight[rng.random(weight.shape) < 0.1] = 0
    codes = rng.integers(0, 4, (rows, k), dtype=np.uint8)
    scales = rng.integers(8, 0x6F, (rows, k // 32), dtype=np.uint8)
    scales[rng.random(scales.shape) < 0.2] = 0
    return weight, TwoBitMatrix(codes, scales, float(np.float32(0.01)))


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 9), blocks=st.integers(1, 5), seed=st.integers(0, 2**32 - 1))
def test_every_figure_is_as_defined(rows: int, blocks: int, seed: int) -> None:
    weight, base = _some(np.random.default_rng(seed), rows, 32 * blocks)
    got = matrix_statistics(weight, base)
    w = weight.astype(np.float64)
    scale = E4M3[base.scales].repeat(32, 1) * base.factor
    q = np.array([1.0, 4.0, -1.0, -4.0])[base.codes] * scale
    assert got.count == w.size
    assert got.zeros == (w == 0).sum()
    assert got.negative_zeros == ((w == 0) & (base.codes >= 2)).sum()
    assert got.zero_fraction == (w == 0).mean()
    assert got.codes == tuple((base.codes == c).sum() for c in range(4))
    norm = np.sqrt((w**2).sum())
    assert got.relative_rms == pytest.approx(np.sqrt(((q - w) ** 2).sum()) / norm, rel=1e-12)
    assert got.bias == pytest.approx((q - w).sum() / np.abs(w).sum(), rel=1e-9, abs=1e-12)
    assert got.mean_error == pytest.approx((q - w).mean(), rel=1e-9, abs=1e-12)
    used = scale[scale > 0]
    assert got.scale_min == (used.min() if used.size else math.inf)
    assert got.scale_max == (used.max() if used.size else 0.0)


def test_merged_statistics_are_those_of_all_weights_in_any_order() -> None:
    rng = np.random.default_rng(0)
    pairs = [_some(rng, rows, 64) for rows in (3, 8, 5)]
    parts = [matrix_statistics(weight, base) for weight, base in pairs]
    merged = merge_statistics(parts)
    assert merged == merge_statistics(reversed(parts))
    whole = matrix_statistics(
        np.concatenate([weight for weight, _ in pairs]),
        TwoBitMatrix(
            np.concatenate([base.codes for _, base in pairs]),
            np.concatenate([base.scales for _, base in pairs]),
            pairs[0][1].factor,
        ),
    )
    assert (merged.count, merged.zeros, merged.codes) == (whole.count, whole.zeros, whole.codes)
    assert merged.negative_zeros == whole.negative_zeros
    assert (merged.scale_min, merged.scale_max) == (whole.scale_min, whole.scale_max)
    assert merged.relative_rms == pytest.approx(whole.relative_rms, rel=1e-12)
    assert merged.bias == pytest.approx(whole.bias, rel=1e-9)


def test_json_round_trip_is_exact() -> None:
    rng = np.random.default_rng(1)
    zero = np.zeros((2, 32), np.float32)
    context = MatrixContext(0, 0, "gate")
    for statistics in (
        matrix_statistics(*_some(rng, 4, 64)),
        matrix_statistics(zero, QUANTIZERS["data-free"]().quantize(zero, context)),
        merge_statistics([]),
    ):
        text = json.dumps(statistics.to_json(), allow_nan=False)
        assert MatrixStatistics.from_json(json.loads(text)) == statistics
        for figure in ("relative_rms", "bias", "mean_error", "zero_fraction"):
            assert json.loads(text)[figure] == getattr(statistics, figure)


def test_nothing_divides_by_zero() -> None:
    empty = merge_statistics([])
    assert (empty.relative_rms, empty.bias, empty.mean_error, empty.zero_fraction) == (0, 0, 0, 0)
    assert empty.codes == (0, 0, 0, 0)


def test_bases_of_other_shapes_are_refused() -> None:
    weight, base = _some(np.random.default_rng(2), 4, 64)
    with pytest.raises(ValueError, match="does not belong"):
        matrix_statistics(weight[:2], base)
