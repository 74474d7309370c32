"""The 2-bit base: its form, and the interface that the levels of effort implement."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

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


class Expert(NamedTuple):
    """An expert's float32 matrices: gate and up [intermediate, hidden], down [hidden, interm.]."""

    gate: NDArray[np.float32]
    up: NDArray[np.float32]
    down: NDArray[np.float32]


class TwoBitExpert(NamedTuple):
    """The base of each of an expert's matrices."""

    gate: TwoBitMatrix
    up: TwoBitMatrix
    down: TwoBitMatrix


class BaseQuantizer(ABC):
    """Turns experts into the 2-bit base.

    What a level needs beyond the weights goes to its constructor: level 0 takes nothing; a
    calibrated level takes its calibration and looks up there what belongs to the expert. So the
    packer calls every level alike. An expert's matrices come together, because what the down
    projection multiplies follows from gate and up.

    Threads may call `quantize_expert` of one instance at the same time.

    Attributes:
        name: the registry's name; level: the effort (0, data-free, to 3), stored in the pack.
        calibration: the digest of the calibration that it uses, or None.
        in_order: whether every layer must be finished before the next is begun.
    """

    name: str
    level: int
    calibration: str | None = None
    in_order: bool = False

    @abstractmethod
    def quantize_expert(self, weights: Expert, layer: int, expert: int) -> TwoBitExpert:
        """The base of one expert of a layer; widths are multiples of 32. Deterministic.

        Raises CheckpointError, naming the matrix, when a weight is not finite.
        """


class MatrixQuantizer(BaseQuantizer):
    """A quantizer that looks at one matrix at a time."""

    @abstractmethod
    def quantize(self, weight: NDArray[np.float32], context: MatrixContext) -> TwoBitMatrix:
        """`weight` float32 [N, K], K a multiple of 32, finite. Deterministic."""

    def quantize_expert(self, weights: Expert, layer: int, expert: int) -> TwoBitExpert:
        return TwoBitExpert(
            *(
                self.quantize(weight, MatrixContext(layer, expert, projection))
                for projection, weight in zip(Expert._fields, weights, strict=True)
            )
        )


QUANTIZERS: Registry[type[BaseQuantizer]] = Registry("quantizer")


def require_blocks(weight: NDArray[np.float32]) -> None:
    """ValueError unless `weight` is a non-empty float32 matrix of whole blocks."""
    if weight.dtype != np.float32 or weight.ndim != 2 or not weight.size or weight.shape[1] % BLOCK:
        raise ValueError(
            f"expected a float32 matrix in blocks of {BLOCK}, got {weight.dtype} {weight.shape}"
        )
