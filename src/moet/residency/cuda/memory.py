"""Memory for the places of one tier, in chunks, so that a tier can change its size in place."""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from bisect import bisect_right
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from torch import Tensor

from moet.residency.cuda.driver import Driver
from moet.residency.tiers.device import U8

_CHUNK_BYTES = 256 << 20
_PINNING_THREADS = 8
_HUGE_PAGE = 2 << 20


class ChunkedPlaces(ABC):
    """Places of `row_bytes` each; a place keeps its address for as long as it exists.

    Memory is had and given back in chunks of whole rows.
    """

    def __init__(self, row_bytes: int) -> None:
        self.row_bytes = row_bytes
        self.per_chunk = max(1, _CHUNK_BYTES // row_bytes)
        self.count = 0
        self._ends = [0]  # ends[i + 1]: the first place behind chunk i

    def resize(self, count: int) -> None:
        """Adds places at the end or gives the last ones back.

        Raises ConfigError when there is not enough memory; the places are then as before.
        """
        missing = count - self._ends[-1]
        if missing > 0:
            rows = [self.per_chunk] * (missing // self.per_chunk)
            if rest := missing % self.per_chunk:
                rows.append(rest)
            self._add([r * self.row_bytes for r in rows])
            for r in rows:
                self._ends.append(self._ends[-1] + r)
        while len(self._ends) > 1 and self._ends[-2] >= count:
            self._ends.pop()
            self._drop()
        self.count = count

    def locate(self, slot: int) -> tuple[int, int]:
        """(chunk, byte offset in it) of a place."""
        chunk = bisect_right(self._ends, slot) - 1
        return chunk, (slot - self._ends[chunk]) * self.row_bytes

    @abstractmethod
    def address(self, slot: int) -> int:
        """Where the device finds a place."""

    @abstractmethod
    def _add(self, sizes: list[int]) -> None:
        """Adds chunks of so many bytes; all or none."""

    @abstractmethod
    def _drop(self) -> None:
        """Gives up the last chunk."""


class GpuPlaces(ChunkedPlaces):
    """Places in GPU memory. What is given up goes back to PyTorch's allocator.

    stream: the one that writes the places.
    """

    def __init__(self, row_bytes: int, driver: Driver, stream: int) -> None:
        super().__init__(row_bytes)
        self._driver, self._stream = driver, stream
        self._chunks: list[Tensor] = []

    def address(self, slot: int) -> int:
        chunk, offset = self.locate(slot)
        return self._chunks[chunk].data_ptr() + offset

    def _add(self, sizes: list[int]) -> None:
        self._chunks += [self._driver.gpu_memory(size, self._stream) for size in sizes]

    def _drop(self) -> None:
        self._chunks.pop()


class Pinned(NamedTuple):
    """Pinned memory. memory: uint8. device: where the device finds it."""

    memory: U8
    device: int


class ArenaPlaces(ChunkedPlaces):
    """Places in pinned host memory.

    Pinning finds, clears and locks each page: most of the time goes into touching them, which
    threads do together, in huge pages where the system has them. To unpin a chunk, the driver waits
    for the kernels that run; one of those could wait for this very process, so that chunks are only
    collected here, and used again, until `trim`.
    """

    def __init__(self, row_bytes: int, driver: Driver) -> None:
        super().__init__(row_bytes)
        self._driver = driver
        self._chunks: list[Pinned] = []
        self._given_up: dict[int, list[Pinned]] = {}  # by size

    def address(self, slot: int) -> int:
        chunk, offset = self.locate(slot)
        return self._chunks[chunk].device + offset

    def view(self, slot: int) -> U8:
        """A place's memory, uint8 [row_bytes]."""
        chunk, offset = self.locate(slot)
        return self._chunks[chunk].memory[offset : offset + self.row_bytes]

    def trim(self) -> None:
        """Gives the memory of chunks that were given up back to the system. No kernel may run."""
        for chunks in self._given_up.values():
            while chunks:
                self._driver.unpin(chunks.pop().memory.ctypes.data)

    def _add(self, sizes: list[int]) -> None:
        with ThreadPoolExecutor(_PINNING_THREADS, thread_name_prefix="moet-pin") as threads:
            jobs = [threads.submit(self._chunk, size) for size in sizes]
        errors = [error for job in jobs if (error := job.exception())]
        new = [job.result() for job in jobs if not job.exception()]
        if errors:
            for chunk in new:
                self._give_up(chunk)
            raise errors[0]
        self._chunks += new

    def _drop(self) -> None:
        self._give_up(self._chunks.pop())

    def _give_up(self, chunk: Pinned) -> None:
        self._given_up.setdefault(chunk.memory.size, []).append(chunk)

    def _chunk(self, size: int) -> Pinned:
        """One that was given up, or a new one."""
        try:
            return self._given_up[size].pop()
        except LookupError:
            return self._pin(size)

    def _pin(self, size: int) -> Pinned:
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if size >= _HUGE_PAGE:
            pages.madvise(mmap.MADV_HUGEPAGE)
        memory = np.frombuffer(pages, np.uint8)
        memory[:: mmap.PAGESIZE] = 0
        return Pinned(memory, self._driver.pin(memory.ctypes.data, size))
