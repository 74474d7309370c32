"""The exact search of level 0: for every block the codes and the scale of least squared error.

For a given scale s (in units of the weights) a block's best codes are the nearest: a weight is big
(±4s) where |w| > 2.5 s, else small (±s). With n big weights that sum to B, and S the sum of all,

    Σ (|w| − a s)² = Σ w² − [2 s (S + 3 B) − s² (32 + 15 n)],

so a scale's worth, the bracket, needs n and B only. s is a factor times an E4M3 number, and the
E4M3 byte of |w| / (2.5 · factor), rounded down, is the byte of the largest scale for which w is
big. So a histogram of the 32 bytes, summed from the top, gives n and B of every scale at once.

Which scales can be best? From 0.4 max|w| on nothing is big, and then s / 4 does as well or better:
its ±4 (s / 4) is the same ±s, and ±s / 4 is offered beside it. Nor can a scale below max|w| / 16.7
be best: there, some larger multiple serves the largest weight better by more than it costs the 31
others, whatever they are (a linear program over their distribution gives 16.6). Between the two
are at most WINDOW numbers of E4M3. A worth is found on integers (|w| cut to 2^-26 of the power of
two above the block's largest), so the result does not depend on the order of additions, and hence
not on the machine.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from moet.formats.numbers import E4M3_VALUES
from moet.quantize.base import BLOCK, SCALE_MAX_BYTE, SCALE_MIN_BYTE

WINDOW = 24
# An E4M3 byte is the upper 12 bits of the float32, less this (bias 127 − 7, times 8 mantissas).
_BYTE_SHIFT = 20
_BYTE_BIAS = 960
_FRACTION_BITS = 25
_MAGNITUDE = np.int32(0x7FFFFFFF)
_EXPONENT = np.int32(0x7F800000)
_FIXED_ONE = (254 + _FRACTION_BITS) << 23
_LEAST_EXPONENT = np.int32(_FRACTION_BITS << 23)
_INDEX = 31  # low bits of a worth that give way to the candidate's index

F64 = NDArray[np.float64]
I32 = NDArray[np.int32]
U8 = NDArray[np.uint8]


def search_blocks(weight: NDArray[np.float32], factor: float) -> tuple[U8, U8]:
    """(codes uint8 [N, K], scales uint8 [N, K/32]) of least squared error for W under `factor`.

    weight: finite, C-contiguous, K a multiple of 32. factor: positive, at least 0.4 max|w| / 112.
    A block that no allowed scale serves better than zeros do gets scale 0 and small codes.

    A weight of 0 has no sign, so the one it gets is chosen by error feedback: the sum of q − w over
    the row so far decides, whatever sign the zero is stored with.
    """
    codes = np.empty(weight.shape, np.uint8)
    scales = np.empty((weight.shape[0], weight.shape[1] // BLOCK), np.uint8)
    _search(weight, weight.view(np.int32), np.float64(factor), E4M3_VALUES, codes, scales)
    return codes, scales


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def largest_magnitude(bits: I32) -> np.int32:
    """max |w| as the bits of a float32, of a matrix seen as int32; above 0x7F7FFFFF if not finite.

    On integers, because a maximum of floats would have to mind NaN and could not use vectors.
    """
    largest = np.int32(0)
    for n in range(bits.shape[0]):
        for k in range(bits.shape[1]):
            largest = max(largest, np.int32(bits[n, k] & _MAGNITUDE))
    return largest


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _search(
    weight: NDArray[np.float32],
    bits: I32,
    factor: float,
    scale_values: F64,
    codes: U8,
    scales: U8,
) -> None:
    inverse = np.float32(1 / (2.5 * factor))
    ratio = np.empty(BLOCK, np.float32)  # |w| / (2.5 factor)
    ratio_bits = ratio.view(np.int32)
    fixed = np.empty(BLOCK, np.int32)  # |w| in units of 1 / to_fixed
    bucket = np.empty(BLOCK, np.uint32)
    where = np.empty(BLOCK + 1, np.uint32)
    histogram = np.zeros(WINDOW + 1, np.int64)  # n << 32 | B
    worth = np.empty(WINDOW)
    word = np.empty(1, np.int32)
    real = word.view(np.float32)
    for n in range(weight.shape[0]):
        drift = 0.0  # Σ (q − w) over the row so far
        for b in range(scales.shape[1]):
            start = b * BLOCK
            w, w_bits = weight[n, start : start + BLOCK], bits[n, start : start + BLOCK]
            code = codes[n, start : start + BLOCK]
            top = np.int32(0)
            for i in range(BLOCK):
                top = max(top, np.int32(w_bits[i] & _MAGNITUDE))
            # The power of two that brings max|w| to [2^25, 2^26), or float32's largest.
            word[0] = _FIXED_ONE - max(np.int32(top & _EXPONENT), _LEAST_EXPONENT)
            to_fixed = real[0]
            total, signed, zeros = np.int32(0), np.int32(0), np.int32(0)
            for i in range(BLOCK):
                ratio[i] = abs(w[i]) * inverse
                fixed[i] = np.int32(abs(w[i]) * to_fixed)
                total = np.int32(total + fixed[i])
                mask = w_bits[i] >> np.int32(31)
                signed = np.int32(signed + ((fixed[i] ^ mask) - mask))
                zeros = np.int32(zeros + np.int32((w_bits[i] & _MAGNITUDE) == 0))

            # The window ends at the byte of 0.4 max|w|. Where it would begin below the smallest
            # scale it is moved up, past every scale that could be best for so small a block.
            word[0] = top
            real[0] = real[0] * inverse
            last = (word[0] >> _BYTE_SHIFT) - _BYTE_BIAS
            first = max(min(last, SCALE_MAX_BYTE) - (WINDOW - 1), SCALE_MIN_BYTE)

            # Bucket c + 1: big for the candidates 0..c; bucket 0: for none of them.
            below = np.int32(first + _BYTE_BIAS - 1)
            for i in range(BLOCK):
                index = np.int32((ratio_bits[i] >> np.int32(_BYTE_SHIFT)) - below)
                bucket[i] = min(max(index, np.int32(0)), np.int32(WINDOW))
            for i in range(BLOCK):
                histogram[np.uint64(bucket[i])] += (np.int64(1) << 32) + fixed[i]
            above = np.int64(0)
            for c in range(WINDOW, 0, -1):
                above += histogram[c]
                histogram[c] = above
            unit = np.float64(to_fixed) * factor
            for c in range(WINDOW):
                count = np.float64(np.int32(histogram[c + 1] >> 32))
                big = np.float64(np.int32(histogram[c + 1]))
                s = scale_values[first + c] * unit
                worth[c] = s * (2 * (total + 3 * big) - s * (32 + 15 * count))
            histogram[:] = 0

            # Positive floats are ordered as their bits are, so the best is a maximum of integers
            # that carry their index; a negative worth is a negative integer.
            best = np.int64(0)
            worth_bits = worth.view(np.int64)
            for c in range(WINDOW):
                best = max(best, (worth_bits[c] & ~_INDEX) | c)
            if best == 0:
                scales[n, b] = 0
                code[:] = 0
                drift -= signed / np.float64(to_fixed)
                continue
            byte = first + (best & _INDEX)
            scales[n, b] = byte

            threshold = np.int32((byte + _BYTE_BIAS) << _BYTE_SHIFT)
            levels = np.int32(0)  # Σ ±a over the weights that are not zero
            for i in range(BLOCK):
                is_big = np.int32(ratio_bits[i] >= threshold)
                mask = w_bits[i] >> np.int32(31)
                level = (1 + 3 * is_big) * np.int32((w_bits[i] & _MAGNITUDE) != 0)
                levels = np.int32(levels + ((level ^ mask) - mask))
                code[i] = np.uint8((mask & 2) | is_big)
            s = scale_values[byte] * factor
            drift += levels * s - signed / np.float64(to_fixed)
            if zeros:
                found = 0  # without a branch a weight: where zeros lie cannot be predicted
                for i in range(BLOCK):
                    where[found] = i
                    found += w[i] == 0
                for j in range(found):
                    lean = drift > 0
                    code[where[j]] = np.uint8(2) if lean else np.uint8(0)
                    drift += -s if lean else s
