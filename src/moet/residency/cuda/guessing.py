"""Rows that the next layer will probably read, copied to the GPU between two layers' experts."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from moet.residency.cuda.beside import CopiesBeside
from moet.residency.cuda.driver import Driver
from moet.residency.cuda.kernels import COPY_BLOCKS, Router, Staged, TierKernels

_ROOM_BYTES = 8 << 20  # what PCIe moves between two layers' experts
_MOST_ROWS = 8
GUESSED_TOKENS = 32
"""More tokens use nearly all experts."""


class Guessing(CopiesBeside):
    """Beside a layer's `ensure` it guesses, from that layer's input and the next one's router; from
    the layer's kernels to the next `ensure` it copies.

    Only within one CUDA graph of the whole pass: what is begun in one layer is joined in the next.

    Args:
        routers: by layer index. row_bytes: of the largest row.
    """

    def __init__(
        self,
        kernels: TierKernels,
        driver: Driver,
        routers: Mapping[int, Router],
        top_k: int,
        row_bytes: int,
        device: torch.device,
    ) -> None:
        super().__init__(driver)
        self._kernels, self._routers = kernels, dict(routers)
        any_router = next(iter(self._routers.values()))
        experts, hidden = any_router.weight.shape
        kernels.learn_routers(hidden, top_k, GUESSED_TOKENS)
        rows = min(_MOST_ROWS, max(1, _ROOM_BYTES // row_bytes))
        self._buffer = Staged.empty(experts, rows, row_bytes, device)
        self._guessed: int | None = None  # layer
        # Once outside of a capture, during which no kernel should have to be loaded.
        nothing = torch.empty(0, hidden, dtype=torch.bfloat16, device=device)
        kernels.guess(nothing, nothing, any_router, self._stream)
        kernels.stage_guess(0, kernels.code, self._buffer, COPY_BLOCKS, self._stream)

    def _copies(self, layer: int) -> Staged:
        return self._buffer

    def guess(self, layer: int, x: Tensor, ids: Tensor) -> None:
        """Before a layer's `ensure`. x: its input, bfloat16 [tokens, hidden]. ids: int32 [tokens,
        top-k], its experts; −1 for padding."""
        router = self._routers.get(layer + 1)
        if router is None or len(x) > GUESSED_TOKENS:
            return
        self._follow_launches()
        self._kernels.guess(x, ids, router, self._stream)
        self._guessed = layer + 1

    def guessed(self) -> None:
        """Behind that `ensure`: from here on x may be written over."""
        if self._guessed is not None:
            self._follow_here()

    def copy(self, code: Tensor) -> None:
        """Behind the layer's kernels. code: as of `CudaTierDevice.ensure`."""
        if self._guessed is None:
            return
        self._begun, self._guessed = (self._guessed, code), None
        self._follow_launches()
        self._kernels.stage_guess(self._begun[0], code, self._buffer, COPY_BLOCKS, self._stream)
