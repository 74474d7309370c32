"""An expert's way to the GPU and back."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from moet.pack.files import U8

_ALIGN = 256  # of parts in pinned memory


class Lane:
    """A stream and its pinned host memory, for one thread at a time: copies from other memory wait
    within the driver, and other threads with them."""

    def __init__(self, device: torch.device) -> None:
        self.stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._buffers: dict[str, Tensor] = {}
        self._used = 0

    def begin(self, size: int) -> None:
        """Makes room for so many bytes; what was moved before is not needed any more."""
        self._used = 0
        self._buffer("in", size)

    def to_device(self, part: Tensor, device: torch.device) -> Tensor:
        source = part.contiguous()
        raw = source.reshape(-1).view(torch.uint8)
        pinned = self._buffer("in", 0)[self._used : self._used + len(raw)]
        self._used += aligned(len(raw))
        np.copyto(pinned.numpy(), raw.numpy())
        moved = torch.empty(len(raw), dtype=torch.uint8, device=device)
        moved.copy_(pinned, non_blocking=True)
        return moved.view(source.dtype).view(source.shape)

    def to_host(self, use: str, tensor: Tensor) -> U8:
        """The bytes, once the stream is synchronized, and until the next call for the same use."""
        raw = tensor.reshape(-1).view(torch.uint8)
        pinned = self._buffer(use, len(raw))[: len(raw)]
        pinned.copy_(raw, non_blocking=True)
        found: U8 = pinned.numpy()
        return found

    def _buffer(self, use: str, size: int) -> Tensor:
        buffer = self._buffers.get(use)
        if buffer is None or len(buffer) < size:
            buffer = self._buffers[use] = host_memory(size)
        return buffer


def aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def host_memory(size: int) -> Tensor:
    """uint8 [size], pinned."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)
