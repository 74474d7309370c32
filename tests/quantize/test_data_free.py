"""Level 0 against searches that know nothing of how it searches, and its treatment of zeros."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from moet.errors import CheckpointError, ConfigError
from moet.formats import FORMATS
from moet.quantize import (
    QUANTIZERS,
    MatrixContext,
    TwoBitMatrix,
    matrix_statistics,
)

CONTEXT = MatrixContext(layer=3, expert=7, projection="up")
ALLOWED = [0, *range(0x08, 0x6F)]
E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
LEVELS = np.array([1.0, 4.0, -1.0, -4.0])


def _quantize(weight: np.ndarray) -> TwoBitMatrix:
    return QUANTIZERS["data-free"]().quantize(weight, CONTEXT)


def _values(base: TwoBitMatrix) -> np.ndarray:
    """The base in float64, by its definition."""
    scale = E4M3[base.scales].repeat(32, 1) * base.factor
    return LEVELS[base.codes] * scale


def _errors(weight: np.ndarray, base: TwoBitMatrix) -> np.ndarray:
    """Squared error of every block."""
    return ((_values(base) - weight) ** 2).reshape(-1, 32).sum(1)


def _least_errors(weight: np.ndarray, factor: float) -> np.ndarray:
    """Least squared error of every block over all allowed scales, each with its nearest codes."""
    size = np.abs(weight.astype(np.float64)).reshape(-1, 32)
    least = np.full(len(size), np.inf)
    for byte in ALLOWED:
        s = E4M3[byte] * factor
        distance = np.minimum(np.abs(size - s), np.abs(size - 4 * s))
        least = np.minimum(least, (distance**2).sum(1))
    return least


def _check_form(base: TwoBitMatrix) -> None:
    assert base.codes.dtype == np.uint8
    assert base.codes.max(initial=0) <= 3
    assert np.isin(base.scales, ALLOWED).all()
    assert not (base.codes.reshape(-1, 32) & 1)[base.scales.ravel() == 0].any()
    assert base.factor > 0
    assert float(np.float32(base.factor)) == base.factor


def _check_least(weight: np.ndarray) -> None:
    base = _quantize(weight)
    _check_form(base)
    squares = (weight.astype(np.float64) ** 2).reshape(-1, 32).sum(1)
    least = _least_errors(weight, base.factor)
    # Sums are on integers of 26 bits, whose unit is never below 2^-127, and thresholds in float32;
    # the rest is exact.
    cut = 32 * 2.0**-127 * np.abs(weight.astype(np.float64)).reshape(-1, 32).max(1)
    assert (_errors(weight, base) <= least + 1e-6 * squares + cut).all()


_element = st.one_of(
    st.sampled_from([0.0, -0.0, 0.5, -1.0, 1.5, 2.5, 4.0, -6.0, 10.0, 16.0]),
    st.floats(-1, 1, width=32),
    st.floats(-(2.0**60), 2.0**60, width=32),
)


@settings(max_examples=150, deadline=None)
@given(
    arrays(np.float32, st.tuples(st.integers(1, 3), st.sampled_from([32, 64])), elements=_element)
)
def test_no_allowed_scale_is_better(weight: np.ndarray) -> None:
    _check_least(weight)


@settings(max_examples=60, deadline=None)
@given(
    outliers=st.lists(st.floats(2.0**-7, 40, width=32), min_size=1, max_size=31),
    rest=st.floats(0, 4, width=32),
    size=st.integers(-40, 40),
)
def test_no_allowed_scale_is_better_where_few_weights_stand_out(
    outliers: list[float], rest: float, size: int
) -> None:
    """The search looks at a window of scales; blocks like these are the ones that stretch it."""
    block = np.full((1, 32), rest, np.float32)
    block[0, : len(outliers)] = outliers
    _check_least(np.ldexp(block, size))


def test_no_allowed_scale_is_better_on_many_distributions() -> None:
    rng = np.random.default_rng(0)
    shape = (300, 256)
    fp4 = FORMATS["mxfp4"].encode(torch.from_numpy(rng.standard_normal(shape).astype("f4")), "ocp")
    for weight in (
        rng.standard_normal(shape),
        rng.standard_t(1.5, shape),
        rng.uniform(-1, 1, shape),
        rng.laplace(0, 1, shape) ** 3,
        rng.choice([-1.0, 1.0], shape),
        np.where(rng.random(shape) < 0.03, 20.0, 1.0) * rng.standard_normal(shape),
        rng.standard_normal(shape) * np.exp2(rng.uniform(-16, 0, (300, 1))),
        np.eye(*shape) + 0.0,
        FORMATS["mxfp4"].decode(fp4).numpy(),
    ):
        _check_least(weight.astype(np.float32))


@pytest.mark.parametrize("size", [1e-45, 1e-40, 1e-38, 1e-35, 1e-30, 1e30])
def test_sizes_near_the_ends_of_float32(size: float) -> None:
    rng = np.random.default_rng(1)
    weight = (rng.standard_normal((8, 64)) * size).astype(np.float32)
    base = _quantize(weight)
    _check_form(base)
    assert np.isfinite(_values(base)).all()
    _check_least(weight)
    if size >= 1e-36:
        assert matrix_statistics(weight, base).relative_rms < 0.4


def test_all_codes_and_scales_tried_on_blocks_of_few_weights() -> None:
    """Nothing about "nearest" is assumed here: all 4^3 codes with every allowed scale."""
    rng = np.random.default_rng(2)
    codes = np.array(list(itertools.product(range(4), repeat=3)))
    for _ in range(25):
        weight = np.zeros((1, 32), np.float32)
        weight[0, :3] = rng.standard_normal(3) * rng.choice([0.1, 1.0, 10.0], 3)
        base = _quantize(weight)
        s = E4M3[ALLOWED] * base.factor
        three = ((LEVELS[codes][None] * s[:, None, None] - weight[0, :3]) ** 2).sum(2).min(1)
        least = (three + 29 * s**2).min()  # a zero is s away from its nearest code
        assert _errors(weight, base)[0] == pytest.approx(least, rel=1e-6)


def test_signs_are_the_weights_own() -> None:
    rng = np.random.default_rng(4)
    weight = rng.standard_normal((64, 96)).astype(np.float32)
    assert np.array_equal(_quantize(weight).codes >> 1, weight < 0)


def test_the_factor_leaves_room_for_large_and_small_blocks() -> None:
    rng = np.random.default_rng(5)
    # The largest scale that a block can need: 31 weights just below 0.4 of the largest.
    weight = np.full((4, 32), 0.397, np.float32)
    weight[0, 0], weight[1], weight[2] = 1.0, 1e-3, 2e-4 * rng.standard_normal(32)
    base = _quantize(weight)
    assert base.scales.max() >= 0x68
    assert base.scales.min() >= 0x08
    _check_least(weight)
    row = _values(base)[2] - weight[2]
    assert np.linalg.norm(row) / np.linalg.norm(weight[2]) < 0.4


def test_weights_of_one_size_are_exact() -> None:
    rng = np.random.default_rng(12)
    weight = (0.0173 * rng.choice([-1, 1], (8, 64))).astype(np.float32)
    assert np.array_equal(_quantize(weight).decode(), weight)


def test_zero_blocks_have_scale_zero_and_small_codes() -> None:
    rng = np.random.default_rng(6)
    weight = rng.standard_normal((8, 128)).astype(np.float32)
    weight[2, 32:64], weight[5] = 0.0, -0.0
    base = _quantize(weight)
    zero = np.zeros((8, 4), bool)
    zero[2, 1], zero[5] = True, True
    assert np.array_equal(base.scales == 0, zero)
    assert not (base.codes.reshape(8, 4, 32) & 1)[zero].any()
    assert not base.decode().reshape(8, 4, 32)[zero].any()
    everywhere = _quantize(np.zeros((4, 64), np.float32))
    assert not everywhere.scales.any()
    assert everywhere.factor == 1.0


def _fp4_weights(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """As an FP4 checkpoint decodes: about 8 % exact zeros."""
    weight = torch.from_numpy((rng.standard_normal(shape) * 0.02).astype(np.float32))
    fp4 = FORMATS["mxfp4"]
    decoded: np.ndarray = fp4.decode(fp4.encode(weight, "ocp")).numpy()
    return decoded


def test_the_stored_sign_of_a_zero_decides_nothing() -> None:
    rng = np.random.default_rng(7)
    weight = _fp4_weights(rng, (64, 512))
    zero = weight == 0
    assert zero.mean() > 0.05
    plus, minus, mixed = (weight.copy() for _ in range(3))
    plus[zero], minus[zero] = 0.0, -0.0
    mixed[zero] = np.where(rng.random(zero.sum()) < 0.5, 0.0, -0.0)
    bases = [_quantize(w) for w in (plus, minus, mixed)]
    for base in bases[1:]:
        assert np.array_equal(base.codes, bases[0].codes)
        assert np.array_equal(base.scales, bases[0].scales)
        assert base.factor == bases[0].factor


def test_zeros_stored_as_plus_zero_bring_no_bias() -> None:
    rng = np.random.default_rng(8)
    weight = np.abs(_fp4_weights(rng, (128, 512))) * rng.choice([-1, 1], (128, 512))
    weight = np.where(weight == 0, 0.0, weight).astype(np.float32)
    assert not np.signbit(weight[weight == 0]).any()
    base = _quantize(weight)
    signed = base.codes.copy()
    signed[weight == 0] &= 1  # what taking the stored sign would give
    by_sign = TwoBitMatrix(signed, base.scales, base.factor)
    assert matrix_statistics(weight, by_sign).bias > 0.015
    assert abs(matrix_statistics(weight, base).bias) < 0.002


@settings(max_examples=60, deadline=None)
@given(
    sparsity=st.floats(0.02, 0.98), blocks=st.integers(1, 12), seed=st.integers(0, 2**32 - 1)
)  # fmt: skip
def test_the_drift_of_a_row_is_held_by_its_zeros(sparsity: float, blocks: int, seed: int) -> None:
    """Wherever a zero occurs the row's sum of errors moves toward 0, or past it by one step."""
    rng = np.random.default_rng(seed)
    weight = rng.standard_normal((3, 32 * blocks)).astype(np.float32)
    weight[rng.random(weight.shape) < sparsity] = 0.0
    base = _quantize(weight)
    error = _values(base) - weight
    step = E4M3[base.scales].repeat(32, 1) * base.factor
    for row in range(3):
        drift = 0.0
        for b in range(blocks):
            block = slice(32 * b, 32 * b + 32)
            zero = weight[row, block] == 0
            # Within a block the weights that are not zero count first.
            drift += error[row, block][~zero].sum()
            for e, s in zip(error[row, block][zero], step[row, block][zero], strict=True):
                tolerance = 1e-5 * np.abs(weight[row]).sum() + 1e-12
                assert abs(drift + e) <= max(abs(drift), s) + tolerance
                drift += e


def test_same_bits_from_any_memory_and_in_threads() -> None:
    rng = np.random.default_rng(9)
    weight = _fp4_weights(rng, (96, 256))
    first = _quantize(weight)
    quantizer = QUANTIZERS["data-free"]()
    with ThreadPoolExecutor(4) as threads:
        again = list(threads.map(lambda _: quantizer.quantize(weight, CONTEXT), range(16)))
    strided = np.empty((96, 512), np.float32)
    strided[:, ::2] = weight
    again += [_quantize(strided[:, ::2]), _quantize(np.asfortranarray(weight))]
    # A row's result depends on the row and the factor alone.
    for other in again:
        assert np.array_equal(first.codes, other.codes)
        assert np.array_equal(first.scales, other.scales)
        assert first.factor == other.factor


def test_matrix_and_decode_agree_with_the_definition() -> None:
    rng = np.random.default_rng(10)
    weight = rng.standard_normal((32, 64)).astype(np.float32)
    base = _quantize(weight)
    assert base.matrix().codes is base.codes
    assert base.matrix().scales is base.scales
    assert np.array_equal(base.decode(), _values(base).astype(np.float32))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_refused(bad: float) -> None:
    weight = np.ones((4, 64), np.float32)
    weight[1, 40] = bad
    with pytest.raises(CheckpointError, match="layer 3, expert 7, up has a weight that is not"):
        _quantize(weight)


@pytest.mark.parametrize("shape", [(4, 40), (64,), (0, 32), (4, 0)])
def test_shapes_that_are_not_whole_blocks_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="in blocks of 32"):
        _quantize(np.zeros(shape, np.float32))


def test_unknown_quantizers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"unknown quantizer 'awq'.*data-free"):
        QUANTIZERS["awq"]


def test_relative_rms_on_normal_weights() -> None:
    rng = np.random.default_rng(11)
    weight = rng.standard_normal((128, 1024)).astype(np.float32)
    assert matrix_statistics(weight, _quantize(weight)).relative_rms == pytest.approx(
        0.327, abs=0.003
    )
    fp4 = _fp4_weights(rng, (128, 1024))
    assert matrix_statistics(fp4, _quantize(fp4)).relative_rms == pytest.approx(0.322, abs=0.003)
