"""Rows of the next layer, copied to the GPU while a layer of a prompt is computed."""

from __future__ import annotations

import torch
from torch import Tensor

from moet.residency.cuda.driver import Driver
from moet.residency.cuda.kernels import Staged, TierKernels

_BLOCKS = 16  # as many multiprocessors saturate PCIe
_ROUTINGS_AN_EXPERT = 4  # with so many, a layer uses nearly all its experts


class Staging:
    """Two buffers in turns. Copies run on a stream of their own from a layer's `ensure` to the next
    one's: never while a step waits for rows, since a request may take the place of any row that the
    waiting layer does not use.

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
        self._kernels, self._driver = kernels, driver
        self._least = shape[1] * _ROUTINGS_AN_EXPERT
        self._buffers = [Staged.empty(shape[1], rows, row_bytes, device) for _ in range(2)]
        self._stream = driver.stream()
        self._fork, self._join = driver.event(), driver.event()
        self._last = shape[0] - 1  # of the layers in a pass that began with the first
        self._begun: tuple[int, Tensor] | None = None  # layer, its precisions

    def joined(self, layer: int | None = None, code: Tensor | None = None) -> Staged | None:
        """The copies of this layer at these precisions, if they have been begun; whatever has been
        is over then, for what is launched from now on."""
        begun, self._begun = self._begun, None
        if begun is None:
            return None
        self._driver.follow(self._driver.launching(), self._stream, self._join)
        return self._buffers[begun[0] % 2] if begun[0] == layer and begun[1] is code else None

    def start(self, layer: int, code: Tensor, ids: int) -> None:
        """Starts copying for the layer after this one, if a pass of so many ids is worth it.

        code: uint8 [layers, experts], on the device; the rows' precisions."""
        if ids < self._least or layer >= self._last or self._driver.capturing():
            return  # a graph may end between two layers, with the copies not joined
        self._begun = layer + 1, code
        self._driver.follow(self._stream, self._driver.launching(), self._fork)
        into = self._buffers[(layer + 1) % 2]
        self._kernels.stage(layer + 1, code, into, _BLOCKS, self._stream)

    def finish(self, last: int) -> None:
        """A pass that began with the first layer has ended with this one."""
        self.joined()
        self._last = last

    def close(self) -> None:
        self._driver.destroy([self._stream], [self._fork, self._join])
