"""Threads that read rows from the source into slots. They touch nothing but the bytes."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

from moet.pack.source import RowKey, RowSource
from moet.residency.backend import SlotBackend


class ReadResult(NamedTuple):
    """nbytes: read from storage. seconds: that it took."""

    nbytes: int
    seconds: float


class RowReader:
    """Reads rows in `threads` threads.

    What a thread wrote is seen by whoever has the future's result.
    """

    def __init__(self, source: RowSource, backend: SlotBackend, threads: int) -> None:
        self._source = source
        self._backend = backend
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="moet-io")

    def start(self, key: RowKey, slot: int) -> Future[ReadResult]:
        """Reads the row into a slot, which nobody else may use until the future is done."""
        return self._threads.submit(self._read, key, slot)

    def background(self, job: Callable[[], None]) -> Future[None]:
        """Runs another short job, between reads."""
        return self._threads.submit(job)

    def close(self) -> None:
        """Waits for the reads that run, drops those that wait."""
        self._threads.shutdown(cancel_futures=True)

    def _read(self, key: RowKey, slot: int) -> ReadResult:
        start = time.perf_counter()
        nbytes = self._backend.write(key.precision, slot, partial(self._source.read, key))
        return ReadResult(nbytes, time.perf_counter() - start)
