"""Activations as the kernels read them, and the activation function.

A block of 32 activations is one record: every value rounded to a multiple of the block's step, a
power of two such that the largest is at most 2^22 steps. That is 22 bits below the block's largest
value, against float32's 24 below each value: the same order as the rounding of a float32 sum.

Record, 112 bytes: digits int8 [3][32], lowest first, value = d0 + 256 d1 + 65536 d2, in the order
in which the codebook's bytes meet them (`ORDERS`); step float32; −offset · Σ value as int32 for
each half of the block; 4 bytes unused.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from moet.formats.layout import TILE
from moet.kernels.cpu.simd import BASE, E2M1

DIGITS = 3
RECORD_BYTES = 112
STEP_AT = DIGITS * TILE
SUMS_AT = STEP_AT + 4
BASE_ORDER, FP4_ORDER = 0, 1
# k of the tile at each of a record's 32 places [t][half][byte], by order.
ORDERS = np.array(
    [
        [
            8 * t + 6 - 2 * half - 4 * (i & 1) + (i >> 1)
            for t in range(4)
            for half in range(2)
            for i in range(4)
        ],
        [8 * t + 2 * i + half for t in range(4) for half in range(2) for i in range(4)],
    ],
    np.int64,
)
OFFSETS = np.array([BASE.offset, E2M1.offset], np.int32)

_SMALLEST = 22  # biased exponents below this one (values under 2^-105) count as zero
_TO_BYTES = 0x00808080


def _bitcast(source: Any, target: Any) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def cast(typing: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.bitcast(args[0], context.get_value_type(target))

        return target(source), codegen

    return cast


float_bits = _bitcast(types.float32, types.int32)
bits_float = _bitcast(types.int32, types.float32)


@njit  # type: ignore[untyped-decorator]
def to_record(
    values: NDArray[np.float32], order: int, digits: NDArray[np.uint8], words: NDArray[np.int32]
) -> None:
    """Writes one block's record.

    values: [32]. digits: uint8 [112], the record; words: the same memory as int32 [28].
    A value that is not finite makes the step NaN, and with it everything computed from the record.
    """
    largest = np.int32(0)
    for k in range(TILE):
        largest = max(largest, float_bits(values[k]) & np.int32(0x7FFFFFFF))
    exponent = max(largest >> np.int32(23), np.int32(_SMALLEST))
    finite = exponent < 255
    scale = bits_float((np.int32(275) - exponent) << np.int32(23)) if finite else np.float32(0)
    step = (exponent - np.int32(21)) << np.int32(23) if finite else np.int32(0x7FC00000)
    rounded = np.empty(TILE, np.int32)
    for k in range(TILE):
        # Adding 1.5 · 2^23 leaves the rounded integer in the low bits of the sum.
        shifted = values[k] * scale + np.float32(12582912.0)
        rounded[k] = float_bits(shifted) - np.int32(0x4B400000) if finite else np.int32(0)
    for half in range(2):
        total = np.int32(0)
        for k in range(TILE // 2):
            total += rounded[half * TILE // 2 + k]
        words[SUMS_AT // 4 + half] = -OFFSETS[order] * total
    words[STEP_AT // 4] = step
    for place in range(TILE):
        # Bytes of value + 0x808080 are the digits + 128; the top bit turns them into int8.
        bits = (rounded[ORDERS[order, place]] + np.int32(_TO_BYTES)) ^ np.int32(_TO_BYTES)
        for digit in range(DIGITS):
            digits[digit * TILE + place] = (bits >> np.int32(8 * digit)) & np.int32(0xFF)


@njit  # type: ignore[untyped-decorator]
def swiglu(
    gate: NDArray[np.float32], up: NDArray[np.float32], limit: float, alpha: float, beta: float
) -> None:
    """gate = gate · sigmoid(alpha · gate) · (up + beta) in place, [32]; gate ≤ limit and
    |up| ≤ limit first."""
    top = np.float32(limit)
    for k in range(gate.size):
        g = top if gate[k] > top else gate[k]
        u = top if up[k] > top else up[k]
        u = -top if u < -top else u
        gate[k] = g / (np.float32(1) + _exp(-np.float32(alpha) * g)) * (u + np.float32(beta))


@njit  # type: ignore[untyped-decorator]
def _exp(x: Any) -> Any:
    """e^x within 2 units in the last place for |x| ≤ 87, clamped beyond; the C library's function
    is a call for each value, and rounds differently from machine to machine."""
    x = np.float32(87) if x > np.float32(87) else x
    x = np.float32(-87) if x < np.float32(-87) else x
    shifted = x * np.float32(1.44269504) + np.float32(12582912.0)
    n = shifted - np.float32(12582912.0)
    r = x - n * np.float32(0.693359375)  # ln 2 in two parts: this product is exact
    r = r - n * np.float32(-2.12194440e-4)
    y = np.float32(1 / 5040)
    y = y * r + np.float32(1 / 720)
    y = y * r + np.float32(1 / 120)
    y = y * r + np.float32(1 / 24)
    y = y * r + np.float32(1 / 6)
    y = y * r + np.float32(0.5)
    y = y * r + np.float32(1)
    y = y * r + np.float32(1)
    return y * bits_float(
        (float_bits(shifted) - np.int32(0x4B400000) + np.int32(127)) << np.int32(23)
    )
