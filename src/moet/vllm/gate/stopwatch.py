"""How long something takes that a GPU does, without waiting for it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Stopwatch:
    """Adds up the time between two points of the current stream; on the CPU, of the thread."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._pending: deque[tuple[Any, Any]] = deque()  # pairs of CUDA events

    @contextmanager
    def timed(self, device: torch.device) -> Iterator[None]:
        """Adds what the work inside takes on `device`."""
        if device.type != "cuda":
            start = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - start
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        yield
        end.record()
        self._pending.append((begin, end))
        while self._pending and self._pending[0][1].query():
            self._add()

    @property
    def seconds(self) -> float:
        """All that has been timed; waits for what has not ended."""
        while self._pending:
            self._pending[0][1].synchronize()
            self._add()
        return self._seconds

    def _add(self) -> None:
        begin, end = self._pending.popleft()
        self._seconds += begin.elapsed_time(end) / 1e3
