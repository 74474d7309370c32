"""The memory that kernels read rows from, and the clock of its readers."""

from __future__ import annotations

import contextlib
import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from moet.errors import ConfigError
from moet.formats.layout import Precision

U8 = NDArray[np.uint8]


class SlotBackend(ABC):
    """Slots in the memory of one device. Another device is another backend, not another manager.

    An *epoch* is the number of a wave, counted from 1. The manager writes a slot only after
    `completed()` has reached every epoch in which the slot was read.
    """

    @abstractmethod
    def allocate(self, pool: Precision, slots: int, row_bytes: int) -> None:
        """Reserves a pool of `slots` slots of `row_bytes` each.

        Raises ConfigError when there is not enough memory.
        """

    @abstractmethod
    def write(self, pool: Precision, slot: int, read: Callable[[U8], int]) -> int:
        """Fills a slot with what `read` puts into a buffer, uint8 [row_bytes]; returns its result.

        Called by I/O threads. When it returns, work submitted from then on sees the whole row. An
        error of `read` passes through; the slot's bytes are then undefined.
        """

    @abstractmethod
    def address(self, pool: Precision, slot: int) -> int:
        """Where kernels read the slot's row: never 0."""

    @abstractmethod
    def end_epoch(self, epoch: int) -> None:
        """All work that reads the rows of `epoch` has been submitted. Called in ascending order."""

    @abstractmethod
    def completed(self) -> int:
        """The newest epoch such that it and all before it have been read to the end."""

    @abstractmethod
    def wait(self, epoch: int) -> None:
        """Blocks until `completed() >= epoch`; `end_epoch(epoch)` was called before."""

    @abstractmethod
    def close(self) -> None:
        """Frees the pools; nothing reads them any more."""


class HostBackend(SlotBackend):
    """Ordinary memory: one anonymous, page-aligned mapping a pool.

    Kernels run in the thread that holds the lease, so an epoch has been read when it ends.

    Args:
        huge_pages: ask for transparent huge pages (fewer TLB misses in large pools).
        prefault: touch every page at once, so that a lack of memory shows at start.
    """

    def __init__(self, huge_pages: bool = True, prefault: bool = False) -> None:
        self._huge_pages = huge_pages
        self._prefault = prefault
        self._memory: dict[Precision, U8] = {}  # [slots, row_bytes]; holds the mapping alive
        self._ended = 0

    def allocate(self, pool: Precision, slots: int, row_bytes: int) -> None:
        try:
            mapping = mmap.mmap(-1, slots * row_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"{slots} slots of {row_bytes} bytes for {pool} rows cannot be allocated: {error}.",
                "Make the pool smaller.",
            ) from None
        if self._huge_pages:
            with contextlib.suppress(OSError):  # only a hint; some kernels have none
                mapping.madvise(mmap.MADV_HUGEPAGE)
        memory = np.frombuffer(mapping, np.uint8)
        if self._prefault:
            memory[:: mmap.PAGESIZE] = 0
        self._memory[pool] = memory.reshape(slots, row_bytes)

    def write(self, pool: Precision, slot: int, read: Callable[[U8], int]) -> int:
        return read(self._memory[pool][slot])

    def address(self, pool: Precision, slot: int) -> int:
        memory = self._memory[pool]
        return int(memory.ctypes.data + slot * memory.shape[1])

    def end_epoch(self, epoch: int) -> None:
        self._ended = epoch

    def completed(self) -> int:
        return self._ended

    def wait(self, epoch: int) -> None:
        assert epoch <= self._ended, "an epoch that has not ended is waited for"

    def close(self) -> None:
        self._memory.clear()
