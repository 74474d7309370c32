"""The small number types of block formats: E2M1, E4M3, E8M0.

E2M1 and E8M0 are those of the OCP Microscaling Formats (MX) specification 1.0; E4M3 is that of the
OCP 8-bit Floating Point specification (OFP8), torch's `float8_e4m3fn`: no infinities, one NaN a
sign, largest 448. Every value of all three is a float32 number.

Codes are uint8 throughout. Decoding is a table, encoding (of E4M3 here, of E2M1 in `fp4_search`)
rounds to nearest, ties to even, and saturates: a value too large becomes the largest number, never
a NaN.
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


# Code → value; a code of E2M1 is a nibble, its sign in bit 3. NumPy, not torch: a torch table made
# here would land on whatever default device the importer happens to have set.
E2M1_VALUES: NDArray[np.float64] = np.array(
    [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
)
E4M3_VALUES: NDArray[np.float64] = _e4m3_values()
E8M0_VALUES: NDArray[np.float64] = _e8m0_values()
for _table in (E2M1_VALUES, E4M3_VALUES, E8M0_VALUES):
    _table.setflags(write=False)


def decode_e4m3(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of E4M3 bytes; NaN for 0x7F and 0xFF."""
    values = torch.from_numpy(E4M3_VALUES.astype(np.float64)).to(dtype)
    return values.to(codes.device)[codes.int()]


def encode_e4m3(values: Tensor) -> Tensor:
    """E4M3 bytes, uint8, of float32 or float64 values; NaN becomes 0x7F or 0xFF."""
    clamped = values.clamp(-E4M3_MAX, E4M3_MAX)
    # Rounded here, in the values' own type: torch's cast goes through float32, so that a float64
    # value would be rounded twice. The cast below then has nothing left to round.
    quantum = torch.ldexp(torch.ones_like(clamped), floor_log2(clamped, E4M3_MIN_EXPONENT) - 3)
    rounded = torch.copysign(torch.round(clamped / quantum) * quantum, clamped)
    return rounded.to(torch.float32).to(torch.float8_e4m3fn).view(torch.uint8)


def floor_log2(values: Tensor, least: int = -E8M0_BIAS) -> Tensor:
    """floor(log2 |value|) of finite values, exact, int32, at least `least`; `least` for 0."""
    exponent = torch.frexp(values).exponent - 1
    return torch.where(values == 0, least, exponent).clamp(min=least)
