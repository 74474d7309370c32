"""Copies by the copy engine, started by a thread of their own.

Another thread's call can hold the driver until all kernels have ended (memory freed, a kernel
loaded at its first use). If one of those kernels waits for rows, then whoever is to bring them must
not wait for the driver: so that the owner of the tiers never calls it here. It also learns from
pinned memory, not from the driver, which copies have ended.
"""

from __future__ import annotations

import threading
from queue import Empty, SimpleQueue

import numpy as np

from moet.residency.cuda.driver import Driver
from moet.residency.cuda.waiting import U64
from moet.residency.tiers.device import Copy

# As of `Driver.start_copies`.
_Line = tuple[int, int, int, int, int, int]


class DeviceCopy(Copy):
    """The copy of this number in its direction."""

    def __init__(self, streams: CopyStreams, way: int, number: int) -> None:
        self._streams, self._way, self._number = streams, way, number

    def done(self) -> bool:
        """See the base class. Raises CudaError when this copy or another could not be started."""
        if self._streams.error is not None:
            raise self._streams.error
        return int(self._streams.landed[self._way]) >= self._number


class CopyStreams:
    """One stream for each direction: PCIe moves both ways at once.

    Args:
        landed: pinned, uint64 [2]: the newest copy of each direction that has ended.

    Attributes:
        error: why copies could not be started; there are none any more then.
    """

    def __init__(self, driver: Driver, landed: U64) -> None:
        self.landed = landed
        self.error: Exception | None = None
        self._driver = driver
        self._streams = [driver.stream(), driver.stream()]
        self._numbers = [0, 0]
        self._lines: SimpleQueue[_Line | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="moet-copy", daemon=True)
        self._thread.start()

    @property
    def to_gpu(self) -> int:
        return self._streams[0]

    def start(self, target: int, source: int, size: int, to_host: bool) -> DeviceCopy:
        """Addresses and bytes of any memory that the device reaches."""
        way = int(to_host)
        self._numbers[way] += 1
        number, word = self._numbers[way], self.landed[way:].ctypes.data
        self._lines.put((target, source, size, self._streams[way], word, number))
        return DeviceCopy(self, way, number)

    def close(self) -> None:
        """No copy may be under way."""
        self._lines.put(None)
        self._thread.join()
        self._driver.destroy(self._streams, [])

    def _run(self) -> None:
        """Starts all that have come meanwhile in one call: each call of the interpreter's may cost
        a switch interval."""
        self._driver.adopt_thread()
        while (line := self._lines.get()) is not None:
            lines: list[_Line | None] = [line]
            while lines[-1] is not None:
                try:
                    lines.append(self._lines.get_nowait())
                except Empty:
                    break
            try:
                if self.error is None:
                    self._driver.start_copies(np.array([one for one in lines if one], np.uint64))
            except Exception as error:
                self.error = error
            if lines[-1] is None:
                return
