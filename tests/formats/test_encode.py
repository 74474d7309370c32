"""Encoders: the scale rules as named, and least error against every scale there is."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from moet.formats import FORMATS

E2M1 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
E4M3 = np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
ALL_RULES = [
    ("mxfp4", "ocp"),
    ("mxfp4", "least_error"),
    ("nvfp4", "amax"),
    ("nvfp4", "least_error"),
    ("fp8_block", "amax"),
    ("int4_group", "amax"),
    ("bf16", "nearest"),
]

# Values near one another, far apart, on the grid, zero of either sign, tiny and huge.
_value = st.one_of(
    st.sampled_from([0.0, -0.0, 0.5, 1.0, 1.5, -2.0, 3.0, 4.0, 5.0, 6.0, 7.0, -7.5, 8.5, 9.0]),
    st.floats(-1, 1, width=32),
    st.floats(-(2.0**100), 2.0**100, width=32),
)


def _matrices(rows: int, k: int) -> st.SearchStrategy[np.ndarray]:
    return arrays(np.float32, (rows, k), elements=_value)


def _distance(blocks: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Least squared error of [B, k] blocks at each of [S] scales → [B, S], by trying all codes."""
    grid = scale[:, None] * E2M1  # [S, 16]
    nearest = np.abs(blocks[:, :, None, None] - grid).min(-1)  # [B, k, S]
    return (nearest**2).sum(1)


def test_ocp_scale_is_the_power_of_two_below_amax_less_two() -> None:
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((64, 64)).astype(np.float32) * np.exp2(
        rng.integers(-60, 60, (64, 1))
    )
    weight = weight.astype(np.float32)
    parts = FORMATS["mxfp4"].encode(torch.from_numpy(weight), "ocp")
    amax = np.abs(weight).reshape(64, 2, 32).max(-1).astype(np.float64)
    wanted = np.frexp(amax)[1] - 1 - 2 + 127
    assert np.array_equal(parts["scale"].view(torch.uint8).numpy(), wanted)
    # Codes: ml_dtypes' rounding of w / scale, which is exact.
    scaled = weight / np.exp2(wanted - 127.0).repeat(32, 1)
    codes = np.clip(scaled, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    stored = parts["codes"].numpy()
    assert np.array_equal(stored & 15, codes[:, 0::2])
    assert np.array_equal(stored >> 4, codes[:, 1::2])


@settings(max_examples=60, deadline=None)
@given(_matrices(3, 32))
def test_mxfp4_least_error_is_the_least_over_all_scales(weight: np.ndarray) -> None:
    parts = FORMATS["mxfp4"].encode(torch.from_numpy(weight), "least_error")
    got = FORMATS["mxfp4"].decode(parts, torch.float64).numpy()
    error = ((got - weight) ** 2).sum(1)
    least = _distance(weight.astype(np.float64), np.exp2(np.arange(255) - 127.0)).min(1)
    assert (error <= least * (1 + 1e-12) + 1e-300).all()


def test_mxfp4_least_error_takes_the_power_below_or_above_where_that_is_better() -> None:
    weight = torch.full((3, 32), 0.5)
    weight[0, 0] = 8.2  # clipped to 6 at half the OCP scale, where the 31 others are exact
    weight[1, 0] = 7.9  # 6 at the OCP scale, 8 at twice that, where the others would be lost
    weight[2, 0] = 4.0  # exact at the OCP scale
    scales = {
        rule: FORMATS["mxfp4"].encode(weight, rule)["scale"].view(torch.uint8).flatten().tolist()
        for rule in ("ocp", "least_error")
    }
    assert scales == {"ocp": [128, 127, 127], "least_error": [127, 127, 127]}
    weight[1, 1:] = 0.0
    (stored,) = FORMATS["mxfp4"].encode(weight[1:2], "least_error")["scale"].view(torch.uint8)
    assert stored.item() == 128


@settings(max_examples=40, deadline=None)
@given(_matrices(2, 48))
def test_nvfp4_least_error_is_the_least_over_all_scales(weight: np.ndarray) -> None:
    parts = FORMATS["nvfp4"].encode(torch.from_numpy(weight), "least_error")
    got = FORMATS["nvfp4"].decode(parts, torch.float64).numpy()
    blocks = weight.astype(np.float64).reshape(-1, 16)
    error = ((got.reshape(-1, 16) - blocks) ** 2).sum(1)
    least = _distance(blocks, E4M3 * parts["global_scale"].item()).min(1)
    assert (error <= least * (1 + 1e-9) + 1e-300).all()


def test_least_error_reaches_into_the_subnormal_scales_of_nvfp4() -> None:
    rng = np.random.default_rng(3)
    weight = (rng.standard_normal((200, 16)) * np.exp2(-rng.uniform(0, 22, (200, 1)))).astype("f4")
    parts = FORMATS["nvfp4"].encode(torch.from_numpy(weight), "least_error")
    used = parts["scale"].view(torch.uint8)
    assert ((used > 0) & (used < 8)).any()
    got = FORMATS["nvfp4"].decode(parts, torch.float64).numpy()
    error = ((got - weight) ** 2).sum(1)
    least = _distance(weight.astype(np.float64), E4M3 * parts["global_scale"].item()).min(1)
    assert (error <= least * (1 + 1e-9)).all()


def test_nvfp4_amax_follows_the_recipe() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(32, 64, generator=generator) * 0.02
    parts = FORMATS["nvfp4"].encode(weight, "amax")
    factor = weight.abs().max() / (6 * 448)
    assert parts["global_scale"] == factor
    amax = weight.reshape(32, 4, 16).abs().amax(-1)
    wanted = (amax.double() / 6 / factor.double()).numpy().astype(ml_dtypes.float8_e4m3fn)
    assert np.array_equal(parts["scale"].view(torch.uint8).numpy(), wanted.view(np.uint8))
    assert parts["scale"].float().max() == 448


@pytest.mark.parametrize(("name", "rule"), ALL_RULES)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_encoded_numbers_are_fixed_points(name: str, rule: str, data: st.DataObject) -> None:
    """What was decoded encodes and decodes to itself where the rule finds the same scale again."""
    rows, k = data.draw(st.integers(1, 3)), 32 * data.draw(st.integers(1, 3))
    weight = torch.from_numpy(data.draw(_matrices(rows, k)))
    parts = FORMATS[name].encode(weight, rule)
    once = FORMATS[name].decode(parts, torch.float64)
    assert once.shape == weight.shape
    assert once.isfinite().all()
    assert once[weight == 0].abs().sum() == 0
    if name == "mxfp4" and once.abs().max() < 1e38:
        again = FORMATS[name].encode(once.float(), rule)
        assert torch.equal(FORMATS[name].decode(again, torch.float64), once)
    if name == "bf16":
        assert torch.equal(FORMATS[name].decode(parts), weight.bfloat16().float())


@pytest.mark.parametrize(("name", "rule"), ALL_RULES)
def test_all_zero_matrices_survive(name: str, rule: str) -> None:
    parts = FORMATS[name].encode(torch.zeros(130, 160), rule)
    assert not FORMATS[name].decode(parts).any()


@pytest.mark.parametrize(("name", "rule"), ALL_RULES)
@pytest.mark.parametrize("size", [1e-44, 1e-38, 1e-20, 1e30, 3e38])
def test_extreme_sizes_keep_their_size(name: str, rule: str, size: float) -> None:
    weight = torch.full((32, 32), size)
    got = FORMATS[name].decode(FORMATS[name].encode(weight, rule), torch.float64)
    if size < 1e-36:
        assert got.abs().max() <= 1e-36  # below every scale, or subnormal; no more is promised
    else:
        assert (got / weight.double() - 1).abs().max() < 0.26


def test_errors_are_of_the_known_size() -> None:
    """Relative RMS on normal weights; a shifted nibble or block would be several times as much."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(256, 1024, generator=generator)
    rms = {}
    for name, rule in ALL_RULES:
        got = FORMATS[name].decode(FORMATS[name].encode(weight, rule))
        rms[name, rule] = float((got - weight).norm() / weight.norm())
    assert rms["mxfp4", "ocp"] == pytest.approx(0.114, abs=0.003)
    assert rms["nvfp4", "amax"] == pytest.approx(0.095, abs=0.003)
    assert rms["mxfp4", "least_error"] < rms["mxfp4", "ocp"]
    assert rms["nvfp4", "least_error"] < rms["nvfp4", "amax"]
    assert rms["fp8_block", "amax"] == pytest.approx(0.0265, abs=0.002)
    assert rms["int4_group", "amax"] == pytest.approx(0.095, abs=0.01)
    assert rms["bf16", "nearest"] < 0.003
