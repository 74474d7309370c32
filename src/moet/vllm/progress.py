"""How far the filling of memory with rows is, said in the log every ten seconds."""

from __future__ import annotations

import time

from vllm.logger import init_logger

logger = init_logger(f"vllm.{__name__}")  # vLLM shows its own loggers only

_EVERY = 10.0  # seconds


class Progress:
    """Called with (rows done, rows in all)."""

    def __init__(self) -> None:
        self.rows = 0
        self._began = self._last = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since it was made."""
        return time.monotonic() - self._began

    def __call__(self, done: int, total: int) -> None:
        self.rows = done
        if time.monotonic() - self._last >= _EVERY:
            self._last = time.monotonic()
            logger.info("moet: %d of %d rows are in memory.", done, total)
