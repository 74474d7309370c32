"""Threads that read rows from the pack into the arena. They touch nothing but the bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future

from moet.formats.layout import Precision
from moet.pack.source import RowKey, RowSource
from moet.residency.reader import ReadResult
from moet.residency.tiers.device import U8


class RowReads:
    """Starts reads.

    Args:
        layers: the model's indices of the layers, in the table's order. executor: runs the reads.
    """

    def __init__(self, source: RowSource, layers: Sequence[int], executor: Executor) -> None:
        self._source, self._layers, self._executor = source, layers, executor

    def start(self, layer: int, expert: int, precision: Precision, view: U8) -> Future[ReadResult]:
        """Reads a row into `view`, which nobody else may use until the future is done."""
        return self._executor.submit(
            self._read, RowKey(self._layers[layer], expert, precision), view
        )

    def background(self, job: Callable[[], None]) -> Future[None]:
        """Runs another short job between reads."""
        return self._executor.submit(job)

    def close(self) -> None:
        """Waits for what runs, drops what waits."""
        self._executor.shutdown(cancel_futures=True)

    def _read(self, key: RowKey, view: U8) -> ReadResult:
        start = time.perf_counter()
        return ReadResult(self._source.read(key, view), time.perf_counter() - start)
