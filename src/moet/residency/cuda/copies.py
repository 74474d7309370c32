"""Copies by the copy engine, started by a thread of their own.

Another thread's call can hold the driver until all kernels have ended (memory freed, a kernel
loaded at its first use). If one of those kernels waits for rows, then whoever is to bring them must
not wait for the driver: so that the owner of the tiers never calls it here. It also learns from
pinned memory, not from the driver, which copies have ended.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from moet.residency.cuda.driver import Driver
from moet.residency.cuda.waiting import U64
from moet.residency.tiers.device import Copy


class DeviceCopy(Copy):
    """The copy of this number on a stream, whose newest that has ended is in `landed`."""

    def __init__(self, started: Future[None], landed: U64, number: int) -> None:
        self._started, self._landed, self._number = started, landed, number

    def done(self) -> bool:
        """See the base class. Raises CudaError for a copy that could not be started."""
        if not self._started.done():
            return False
        self._started.result()
        return int(self._landed[0]) >= self._number


class CopyStreams:
    """One stream for each direction: PCIe moves both ways at once.

    Args:
        landed: pinned, uint64 [2].
    """

    def __init__(self, driver: Driver, landed: U64) -> None:
        self._driver, self._landed = driver, landed
        self._streams = [driver.stream(), driver.stream()]
        self._numbers = [0, 0]
        self._thread = ThreadPoolExecutor(1, "moet-copy", driver.adopt_thread)

    @property
    def to_gpu(self) -> int:
        return self._streams[0]

    def start(self, target: int, source: int, size: int, to_host: bool) -> DeviceCopy:
        """Addresses and bytes of any memory that the device reaches."""
        way = int(to_host)
        self._numbers[way] += 1
        number, landed = self._numbers[way], self._landed[way : way + 1]
        job = self._thread.submit(self._start, target, source, size, way, number)
        return DeviceCopy(job, landed, number)

    def close(self) -> None:
        """No copy may be under way."""
        self._thread.shutdown()
        self._driver.destroy(self._streams, [])

    def _start(self, target: int, source: int, size: int, way: int, number: int) -> None:
        stream, landed = self._streams[way], self._landed[way : way + 1].ctypes.data
        self._driver.copy(target, source, size, stream)
        self._driver.write(landed, number, stream)
