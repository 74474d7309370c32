"""The small number types of block formats: E2M1, E4M3, E8M0.

E2M1 and E8M0 are those of the OCP Microscaling Formats (MX) specification 1.0; E4M3 is that of the
OCP 8-bit Floating Point specification (OFP8), torch's `float8_e4m3fn`: no infinities, one NaN a
sign, largest 448. Every value of all three is a float32 number.

Codes are uint8 throughout. Decoding is a table, encoding rounds to nearest, ties to even, and
saturates: a value too large becomes the largest number, never a NaN.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_MIN_EXPONENT = -6
E8M0_BIAS = 127
E8M0_NAN = 0xFF


def _e4m3_values() -> NDArray[np.float64]:
    code = np.arange(128)
    exponent, mantissa = code >> 3, code & 7
    value: NDArray[np.float64] = np.where(
        exponent == 0,
        np.ldexp(mantissa / 8, E4M3_MIN_EXPONENT),
        np.ldexp(1 + mantissa / 8, exponent - 7),
    )
    value[0x7F] = np.nan
    table: NDArray[np.float64] = np.concatenate([value, -value])
    return table


def _e8m0_values() -> NDArray[np.float64]:
    value: NDArray[np.float64] = np.ldexp(1.0, np.arange(256) - E8M0_BIAS)
    value[E8M0_NAN] = np.nan
    return value


# Code → value. NumPy, not torch: a torch table made here would land on whatever default device the
# importer happens to have set.
E2M1_VALUES: NDArray[np.float64] = np.array(
    [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
)
E4M3_VALUES: NDArray[np.float64] = _e4m3_values()
E8M0_VALUES: NDArray[np.float64] = _e8m0_values()
for _table in (E2M1_VALUES, E4M3_VALUES, E8M0_VALUES):
    _table.setflags(write=False)

# Midpoints between neighbours of E2M1, and whether the tie goes up (to the even code).
_E2M1_MIDPOINTS = (
    (0.25, False),
    (0.75, True),
    (1.25, False),
    (1.75, True),
    (2.5, False),
    (3.5, True),
    (5.0, False),
)


def decode_e2m1(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of E2M1 nibbles; `codes` uint8 in 0..15, sign in bit 3."""
    return _look_up(E2M1_VALUES, codes, dtype)


def decode_e4m3(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of E4M3 bytes; NaN for 0x7F and 0xFF."""
    return _look_up(E4M3_VALUES, codes, dtype)


def decode_e8m0(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of E8M0 bytes, 2^(code − 127); NaN for 0xFF. Code 0 is a float32 subnormal."""
    return _look_up(E8M0_VALUES, codes, dtype)


def encode_e2m1(values: Tensor) -> Tensor:
    """E2M1 nibbles, uint8, of float32 or float64 values that are not NaN; −0 keeps its sign."""
    magnitude = values.abs()
    code = torch.signbit(values).to(torch.uint8) << 3
    for midpoint, up in _E2M1_MIDPOINTS:
        code += magnitude >= midpoint if up else magnitude > midpoint
    return code


def encode_e4m3(values: Tensor) -> Tensor:
    """E4M3 bytes, uint8, of float32 or float64 values; NaN becomes 0x7F or 0xFF."""
    clamped = values.clamp(-E4M3_MAX, E4M3_MAX)
    # Rounded here, in the values' own type: torch's cast goes through float32, so that a float64
    # value would be rounded twice. The cast below then has nothing left to round.
    quantum = torch.ldexp(torch.ones_like(clamped), floor_log2(clamped, E4M3_MIN_EXPONENT) - 3)
    rounded = torch.copysign(torch.round(clamped / quantum) * quantum, clamped)
    return rounded.to(torch.float32).to(torch.float8_e4m3fn).view(torch.uint8)


def encode_e8m0(values: Tensor) -> Tensor:
    """E8M0 bytes, uint8, of positive float32 or float64 values.

    Nearest by value; of two equally near powers the one with the even code. NaN becomes 0xFF, and
    0, which E8M0 lacks, the smallest power.
    """
    clamped = values.double().clamp(max=2.0**E8M0_BIAS)
    below = floor_log2(clamped)
    ratio = torch.ldexp(clamped, -below)  # in [1, 2) within the range
    code = below + E8M0_BIAS
    up = (ratio > 1.5) | ((ratio == 1.5) & (code % 2 == 1))
    code = (code + up).clamp(0, E8M0_NAN - 1)
    return torch.where(values.isnan(), E8M0_NAN, code).to(torch.uint8)


def floor_log2(values: Tensor, least: int = -E8M0_BIAS) -> Tensor:
    """floor(log2 |value|) of finite values, exact, int32, at least `least`; `least` for 0."""
    exponent = torch.frexp(values).exponent - 1
    return torch.where(values == 0, least, exponent).clamp(min=least)


def _look_up(table: NDArray[np.float64], codes: Tensor, dtype: torch.dtype) -> Tensor:
    values = torch.from_numpy(table.astype(np.float64)).to(dtype)
    return values.to(codes.device)[codes.int()]
