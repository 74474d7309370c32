"""Codes and scale bytes to numbers: one decoder for every precision of a row."""

from __future__ import annotations

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from moet.formats.layout import Matrix, Precision
from moet.formats.numbers import E2M1_VALUES, E4M3_VALUES, E8M0_VALUES

BASE_VALUES: NDArray[np.float64] = np.array([1.0, 4.0, -1.0, -4.0])
BASE_VALUES.setflags(write=False)

_VALUES = {
    Precision.BASE: (BASE_VALUES, E4M3_VALUES),
    Precision.MXFP4: (E2M1_VALUES, E8M0_VALUES),
    Precision.NVFP4: (E2M1_VALUES, E4M3_VALUES),
}


def unpack_nibbles(packed: Tensor) -> NDArray[np.uint8]:
    """[N, K/2] bytes (uint8 or int8), even k in the low nibble → uint8 [N, K]."""
    codes = np.empty((packed.shape[0], 2 * packed.shape[1]), np.uint8)
    _unpack(packed.view(torch.uint8).numpy(), codes)
    return codes


def pack_nibbles(codes: Tensor) -> Tensor:
    """The inverse: uint8 [N, K], K even → uint8 [N, K/2]."""
    return codes[:, 0::2] | codes[:, 1::2] << 4


def decode_matrix(precision: Precision, matrix: Matrix, factor: float) -> NDArray[np.float32]:
    """W [N, K] float32 = value(code) · value(scale) · factor, rounded once, from the exact product.

    The product of code and scale is a float32 number (at most 6 significant bits), so the result is
    exact when factor is a power of two, or has no more than 18 significant bits, and it does not
    leave float32's range; beyond the range it is infinite.
    """
    return decode_to(precision, matrix, factor, torch.float32).numpy()


def decode_to(precision: Precision, matrix: Matrix, factor: float, dtype: torch.dtype) -> Tensor:
    """`decode_matrix` as a tensor, in float32 or float64 (where no rounding happens at all)."""
    codes, scales = _VALUES[precision]
    out = torch.empty(matrix.codes.shape, dtype=dtype, device="cpu")
    _decode(matrix.codes, matrix.scales, codes, scales, factor, out.numpy())
    return out


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _unpack(packed: NDArray[np.uint8], codes: NDArray[np.uint8]) -> None:
    for n in range(packed.shape[0]):
        for i in range(packed.shape[1]):
            codes[n, 2 * i] = packed[n, i] & 15
            codes[n, 2 * i + 1] = packed[n, i] >> 4


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _decode(
    codes: NDArray[np.uint8],
    scales: NDArray[np.uint8],
    code_values: NDArray[np.float64],
    scale_values: NDArray[np.float64],
    factor: float,
    out: NDArray[np.floating],
) -> None:
    block = codes.shape[1] // scales.shape[1]
    values = np.empty(len(code_values), out.dtype)
    for n in range(codes.shape[0]):
        for b in range(scales.shape[1]):
            # Exact in float64: 2 + 4 + 24 significant bits at most. `values` rounds them once.
            scale = scale_values[scales[n, b]] * factor
            for c in range(len(code_values)):
                values[c] = code_values[c] * scale
            for k in range(b * block, (b + 1) * block):
                out[n, k] = values[codes[n, k]]
