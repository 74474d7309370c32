"""FP4 encoding of a matrix: nearest E2M1 codes under the best of a few scales a block.

Compiled, because it encodes every weight of a checkpoint that has no FP4 of its own.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

U8 = NDArray[np.uint8]


def encode_blocks(
    weight: NDArray[np.float32],
    block: int,
    first: NDArray[np.int32],
    count: int,
    largest: int,
    scale_values: NDArray[np.float64],
    factor: float,
) -> tuple[U8, U8]:
    """(codes uint8 [N, K], scale bytes uint8 [N, K/block]) of W [N, K].

    For every block the scale bytes first, first + 1, …, first + count − 1, each no more than
    `largest`, are tried, and the one with the least squared error is kept, the lowest of equals. A
    scale is worth scale_values[byte] · factor, which must be positive. first: int32 [N, K/block].
    """
    codes = np.empty(weight.shape, np.uint8)
    scales = np.empty(first.shape, np.uint8)
    _encode(weight, block, first, count, largest, scale_values, factor, codes, scales)
    return codes, scales


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _encode(
    weight: NDArray[np.float32],
    block: int,
    first: NDArray[np.int32],
    count: int,
    largest: int,
    scale_values: NDArray[np.float64],
    factor: float,
    codes: U8,
    scales: U8,
) -> None:
    magnitude = np.empty(block)
    error = np.empty(block)
    for n in range(first.shape[0]):
        for b in range(first.shape[1]):
            for i in range(block):
                magnitude[i] = abs(np.float64(weight[n, b * block + i]))
            best = min(first[n, b], largest)
            least = np.inf
            if count > 1:
                for step in range(count):
                    byte = min(first[n, b] + step, largest)
                    scale = scale_values[byte] * factor
                    for i in range(block):
                        error[i] = (_round_e2m1(magnitude[i] / scale) * scale - magnitude[i]) ** 2
                    total = _sum(error)
                    if total < least:
                        least = total
                        best = byte
            scale = scale_values[best] * factor
            scales[n, b] = best
            for i in range(block):
                value = _round_e2m1(magnitude[i] / scale)
                code = np.uint8(
                    2 * value if value < 2 else (value + 2 if value < 4 else value / 2 + 4)
                )
                sign = np.uint8(np.signbit(weight[n, b * block + i]))
                codes[n, b * block + i] = code | sign << np.uint8(3)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _round_e2m1(value: np.float64) -> np.float64:
    """The E2M1 number nearest to value ≥ 0, ties to the even code."""
    # Adding 2^52 steps leaves no bit below one step: the addition itself rounds, ties to even.
    steps = 2.0**51 if value < 2 else (2.0**52 if value < 4 else 2.0**53)
    return min((value + steps) - steps, np.float64(6))


@njit(inline="always")  # type: ignore[untyped-decorator]
def _sum(terms: NDArray[np.float64]) -> np.float64:
    """Σ terms, their number a power of two, as a tree (fixed order, and vectors can do it)."""
    half = len(terms) // 2
    while half:
        for i in range(half):
            terms[i] += terms[i + half]
        half //= 2
    total: np.float64 = terms[0]
    return total
