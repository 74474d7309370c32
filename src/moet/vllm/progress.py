"""Lines that come in the log now and then: how far loading is, and statistics while serving."""

from __future__ import annotations

import time
from collections.abc import Callable

from vllm.logger import init_logger

logger = init_logger(f"vllm.{__name__}")  # vLLM shows its own loggers only

_LOADING_EVERY, _SERVING_EVERY = 10.0, 60.0  # seconds


class LoadingProgress:
    """How far the filling of memory is. Called with (rows done, rows in all)."""

    def __init__(self) -> None:
        self.rows = 0
        self._began = self._last = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since it was made."""
        return time.monotonic() - self._began

    def __call__(self, done: int, total: int) -> None:
        self.rows = done
        if time.monotonic() - self._last >= _LOADING_EVERY:
            self._last = time.monotonic()
            logger.info("moet: %d of %d rows are in memory.", done, total)


class Summary:
    """One line a minute, while there is work. Called at every step.

    line: makes it; must not hold what holds this.
    """

    def __init__(self, line: Callable[[], str]) -> None:
        self._line = line
        self._last = time.monotonic()

    def __call__(self) -> None:
        now = time.monotonic()
        if now - self._last >= _SERVING_EVERY:
            self._last = now
            logger.info("moet: %s", self._line())
