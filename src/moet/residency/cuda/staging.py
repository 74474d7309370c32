"""Rows of the next layer, copied to the GPU while a layer of a prompt is computed."""

from __future__ import annotations

import torch
from torch import Tensor

from moet.residency.cuda.beside import CopiesBeside
from moet.residency.cuda.driver import Driver
from moet.residency.cuda.kernels import COPY_BLOCKS, Staged, TierKernels

_ROUTINGS_AN_EXPERT = 4  # with so many, a layer uses nearly all its experts


class Staging(CopiesBeside):
    """Two buffers in turns; copies run from a layer's `ensure` to the next one's.

    Args:
        rows: of a buffer. row_bytes: of the largest row.
    """

    def __init__(
        self,
        kernels: TierKernels,
        driver: Driver,
        shape: tuple[int, int],
        rows: int,
        row_bytes: int,
        device: torch.device,
    ) -> None:
        super().__init__(driver)
        self._kernels = kernels
        self._least = shape[1] * _ROUTINGS_AN_EXPERT
        self._buffers = [Staged.empty(shape[1], rows, row_bytes, device) for _ in range(2)]
        self._last = shape[0] - 1  # of the layers in a pass that began with the first

    def _copies(self, layer: int) -> Staged:
        return self._buffers[layer % 2]

    def start(self, layer: int, code: Tensor, ids: int) -> None:
        """Starts copying for the layer after this one, if a pass of so many ids is worth it.

        code: uint8 [layers, experts], on the device; the rows' precisions."""
        if ids < self._least or layer >= self._last or self._driver.capturing():
            return  # a graph may end between two layers, with the copies not joined
        self._begun = layer + 1, code
        self._follow_launches()
        self._kernels.stage(layer + 1, code, self._copies(layer + 1), COPY_BLOCKS, self._stream)

    def finish(self, last: int) -> None:
        """A pass that began with the first layer has ended with this one."""
        self.joined()
        self._last = last
