"""The 2-bit base: its form, and the interface that the levels of effort implement."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moet.formats.layout import Matrix, Precision
from moet.formats.matrices import decode_matrix
from moet.registry import Registry

BLOCK = 32
SCALE_MIN_BYTE = 0x08  # 2^-6, the smallest normal E4M3: below it, +0x10 is no longer ×4
SCALE_MAX_BYTE = 0x6E  # 112; 4 × 112 = 448 is E4M3's largest


@dataclass(frozen=True)
class TwoBitMatrix:
    """W [N, K] ≈ {+1, +4, −1, −4}[code] · scale · factor.

    codes: uint8 [N, K], sign << 1 | big.
    scales: uint8 [N, K / 32], E4M3 bytes in 0x08..0x6E, or 0 for a block that is zero (whose codes
        are all small), so that scale and 4 · scale are both E4M3 numbers.
    factor: one float32 for the matrix, positive.
    """

    codes: NDArray[np.uint8]
    scales: NDArray[np.uint8]
    factor: float

    def matrix(self) -> Matrix:
        """Codes and scales as the row layout takes them; the same arrays."""
        return Matrix(self.codes, self.scales)

    def decode(self) -> NDArray[np.float32]:
        """The base's own values [N, K], each the exact product rounded once to float32."""
        return decode_matrix(Precision.BASE, self.matrix(), self.factor)


@dataclass(frozen=True)
class MatrixContext:
    """What a quantizer may know of the matrix besides its values.

    layer, expert: where it is. projection: "gate", "up" or "down".
    """

    layer: int
    expert: int
    projection: str

    def __str__(self) -> str:
        return f"layer {self.layer}, expert {self.expert}, {self.projection}"


class BaseQuantizer(ABC):
    """Turns one expert matrix into the 2-bit base.

    What a level needs beyond the matrix goes to its constructor: level 0 takes nothing; a
    calibrated level takes its calibration (Hessians, say) and looks up there, by the context, what
    belongs to the matrix. So the packer calls every level alike.

    Threads may call `quantize` of one instance at the same time.

    Attributes:
        name: the registry's name; level: the effort (0, data-free, to 3), stored in the pack.
    """

    name: str
    level: int

    @abstractmethod
    def quantize(self, weight: NDArray[np.float32], context: MatrixContext) -> TwoBitMatrix:
        """`weight` float32 [N, K], K a multiple of 32, finite. Deterministic."""


QUANTIZERS: Registry[type[BaseQuantizer]] = Registry("quantizer")


def require_blocks(weight: NDArray[np.float32]) -> None:
    """ValueError unless `weight` is a non-empty float32 matrix of whole blocks."""
    if weight.dtype != np.float32 or weight.ndim != 2 or not weight.size or weight.shape[1] % BLOCK:
        raise ValueError(
            f"expected a float32 matrix in blocks of {BLOCK}, got {weight.dtype} {weight.shape}"
        )
