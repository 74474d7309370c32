"""Memory for the places of one tier, in chunks, so that a tier can change its size in place."""

from __future__ import annotations

import contextlib
import mmap
from abc import ABC, abstractmethod
from bisect import bisect_right
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from torch import Tensor

from moet.errors import ConfigError
from moet.residency.cuda.driver import Driver
from moet.residency.tiers.device import U8
from moet.units import byte_size

_CHUNK_BYTES = 256 << 20
_PINNING_THREADS = 8
_HUGE_PAGE = 2 << 20

Chunk = TypeVar("Chunk")


class ChunkedPlaces(ABC, Generic[Chunk]):
    """Places of `row_bytes` each; a place keeps its address for as long as it exists.

    Memory is had in chunks of whole rows. Chunks that are given up are kept for later until `trim`:
    to free one, the driver waits for the kernels that run, and one of those may wait for the very
    thread that wants to free it.
    """

    def __init__(self, row_bytes: int, driver: Driver) -> None:
        self.row_bytes = row_bytes
        self.count = 0
        self._driver = driver
        self._per_chunk = max(1, _CHUNK_BYTES // row_bytes)
        self._chunks: list[Chunk] = []
        self._ends = [0]  # ends[i + 1]: the first place behind chunk i
        self._given_up: dict[int, list[Chunk]] = {}  # by rows

    def resize(self, count: int) -> None:
        """Adds places at the end or gives the last ones back.

        Raises ConfigError when there is not enough memory; the places are then as before.
        """
        missing = count - self._ends[-1]
        if missing > 0:
            rows = [self._per_chunk] * (missing // self._per_chunk)
            if rest := missing % self._per_chunk:
                rows.append(rest)
            self._chunks += self._have(rows)
            for r in rows:
                self._ends.append(self._ends[-1] + r)
        while len(self._ends) > 1 and self._ends[-2] >= count:
            self._give_up(self._chunks.pop(), self._ends.pop() - self._ends[-1])
        self.count = count

    def trim(self) -> None:
        """Gives the memory of chunks that were given up back. No kernel may run."""
        for chunks in self._given_up.values():
            while chunks:
                self._free(chunks.pop())

    def address(self, slot: int) -> int:
        """Where the device finds a place."""
        chunk, offset = self._locate(slot)
        return self._start(self._chunks[chunk]) + offset

    def _locate(self, slot: int) -> tuple[int, int]:
        """(chunk, byte offset in it) of a place."""
        chunk = bisect_right(self._ends, slot) - 1
        return chunk, (slot - self._ends[chunk]) * self.row_bytes

    def _have(self, rows: list[int]) -> list[Chunk]:
        """Chunks of so many rows, those that were given up first; all or none."""
        old = {i: chunks.pop() for i, r in enumerate(rows) if (chunks := self._given_up.get(r))}
        try:
            new = iter(self._make([r * self.row_bytes for i, r in enumerate(rows) if i not in old]))
        except BaseException:
            for i, chunk in old.items():
                self._give_up(chunk, rows[i])
            raise
        return [old[i] if i in old else next(new) for i in range(len(rows))]

    def _give_up(self, chunk: Chunk, rows: int) -> None:
        self._given_up.setdefault(rows, []).append(chunk)

    @abstractmethod
    def _make(self, sizes: list[int]) -> list[Chunk]:
        """Chunks of so many bytes; all or none. Raises ConfigError."""

    @abstractmethod
    def _free(self, chunk: Chunk) -> None: ...

    @abstractmethod
    def _start(self, chunk: Chunk) -> int:
        """The chunk's address for the device."""


class GpuPlaces(ChunkedPlaces[Tensor]):
    """Places in GPU memory. stream: the one that writes them."""

    def __init__(self, row_bytes: int, driver: Driver, stream: int) -> None:
        super().__init__(row_bytes, driver)
        self._stream = stream

    def _make(self, sizes: list[int]) -> list[Tensor]:
        return self._driver.gpu_memory(sizes, self._stream) if sizes else []

    def _free(self, chunk: Tensor) -> None:
        """Goes back to PyTorch's allocator by itself."""

    def _start(self, chunk: Tensor) -> int:
        return chunk.data_ptr()


class Pinned(NamedTuple):
    """Pinned memory. memory: uint8. device: where the device finds it."""

    memory: U8
    device: int


class ArenaPlaces(ChunkedPlaces[Pinned]):
    """Places in pinned host memory.

    Pinning finds, clears and locks each page. Most of the time goes into touching them, which
    threads do together, in huge pages where the system has them.
    """

    def view(self, slot: int) -> U8:
        """A place's memory, uint8 [row_bytes]."""
        chunk, offset = self._locate(slot)
        return self._chunks[chunk].memory[offset : offset + self.row_bytes]

    def _make(self, sizes: list[int]) -> list[Pinned]:
        with ThreadPoolExecutor(_PINNING_THREADS, thread_name_prefix="moet-pin") as threads:
            jobs = [threads.submit(self._pin, size) for size in sizes]
        errors = [error for job in jobs if (error := job.exception())]
        if errors:
            for job in jobs:
                if not job.exception():
                    pinned = job.result()
                    self._give_up(pinned, pinned.memory.size // self.row_bytes)
            raise errors[0]
        return [job.result() for job in jobs]

    def _pin(self, size: int) -> Pinned:
        try:
            pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise ConfigError(
                f"{byte_size(size)} of the arena cannot be allocated: {error}.",
                "Make `arena` smaller.",
            ) from None
        if size >= _HUGE_PAGE:
            with contextlib.suppress(OSError):  # only a hint; some kernels have none
                pages.madvise(mmap.MADV_HUGEPAGE)
        memory = np.frombuffer(pages, np.uint8)
        memory[:: mmap.PAGESIZE] = 0
        return Pinned(memory, self._driver.pin(memory.ctypes.data, size))

    def _free(self, chunk: Pinned) -> None:
        self._driver.unpin(chunk.memory.ctypes.data)

    def _start(self, chunk: Pinned) -> int:
        return chunk.device
