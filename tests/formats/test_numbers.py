"""E2M1, E4M3 and E8M0 against ml_dtypes' and torch's own types, code by code."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from moet.formats import FORMATS
from moet.formats.matrices import unpack_nibbles
from moet.formats.numbers import (
    E2M1_VALUES,
    E8M0_VALUES,
    decode_e4m3,
    encode_e4m3,
    floor_log2,
)

BYTES = torch.arange(256, dtype=torch.uint8)
# Every bfloat16 number that is not NaN: all exponents, subnormals and infinities among them.
BF16 = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
BF16 = BF16[~BF16.isnan()]


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal, NaN as NaN, and −0 apart from +0."""
    return np.array_equal(a, b, equal_nan=True) and np.array_equal(np.signbit(a), np.signbit(b))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_code_decodes_as_in_ml_dtypes_and_torch(dtype: torch.dtype) -> None:
    wanted = BYTES.numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    assert _same(decode_e4m3(BYTES, dtype).double().numpy(), wanted)
    assert _same(BYTES.view(torch.float8_e4m3fn).double().numpy(), wanted)
    wanted = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    assert _same(E2M1_VALUES, wanted)
    wanted = BYTES.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    assert _same(E8M0_VALUES, wanted)
    assert _same(BYTES.view(torch.float8_e8m0fnu).double().numpy(), wanted)


def test_every_code_survives_a_round_trip() -> None:
    assert torch.equal(encode_e4m3(decode_e4m3(BYTES)), BYTES)


def test_e4m3_encodes_as_ml_dtypes_does_below_the_largest_and_saturates_above() -> None:
    values = BF16.float()
    inside = values[values.abs() <= 448]
    wanted = inside.numpy().astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    assert np.array_equal(encode_e4m3(inside).numpy(), wanted)
    outside = values[values.abs() > 448]
    assert torch.isinf(outside).any()
    wanted = torch.where(outside > 0, 0x7E, 0xFE).to(torch.uint8)
    assert torch.equal(encode_e4m3(outside), wanted)
    assert encode_e4m3(torch.tensor([torch.nan])).item() & 0x7F == 0x7F


def test_e2m1_encodes_as_ml_dtypes_does_ties_included() -> None:
    values = BF16.float()
    values = values[values.abs() <= 6]
    weight = torch.full((-(-len(values) // 31), 32), 6.0)  # so that every block's scale is 1
    rows, columns = torch.arange(len(values)) // 31, torch.arange(len(values)) % 31 + 1
    weight[rows, columns] = values
    parts = FORMATS["mxfp4"].encode(weight, "ocp")
    assert (parts["scale"].view(torch.uint8) == 127).all()
    codes = unpack_nibbles(parts["codes"])[rows, columns]
    assert np.array_equal(codes, values.numpy().astype(ml_dtypes.float4_e2m1fn).view(np.uint8))


def _midpoints(numbers: torch.Tensor) -> torch.Tensor:
    """Midpoints of neighbours in float64, and the float64 numbers just beside each."""
    middle = (numbers[1:] + numbers[:-1]) / 2
    beside = [torch.nextafter(middle, torch.tensor(x, dtype=torch.float64)) for x in (0.0, 1e9)]
    return torch.cat([middle, *beside])


def test_float64_is_rounded_once_at_every_midpoint() -> None:
    # ml_dtypes and torch go through float32 here, where "just beside" is the midpoint itself.
    codes = BYTES[:0x7F]
    middle, below, above = _midpoints(decode_e4m3(codes, torch.float64)).chunk(3)
    low, high = codes[:-1], codes[1:]
    assert torch.equal(encode_e4m3(below), low)
    assert torch.equal(encode_e4m3(above), high)
    assert torch.equal(encode_e4m3(middle), torch.where(low % 2 == 0, low, high))


def test_floor_log2_is_exact_beside_powers_of_two() -> None:
    power = torch.arange(-120, 121)
    exact = torch.ldexp(torch.ones(()).expand(241).clone(), power)
    below = torch.nextafter(exact, torch.zeros(()))
    assert torch.equal(floor_log2(exact), power.int())
    assert torch.equal(floor_log2(below), power.int() - 1)
    assert floor_log2(torch.zeros(1)).item() == -127
