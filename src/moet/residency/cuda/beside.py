"""Copies for a later layer, on a stream beside the one that launches layers."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from moet.residency.cuda.driver import Driver
from moet.residency.cuda.kernels import Staged


class CopiesBeside(ABC):
    """What is begun in one layer's turn is over when the next one's `ensure` is launched. It never
    runs while a step waits for rows, since a request may take the place of any row that the waiting
    layer does not use.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._stream = driver.stream()
        self._fork, self._join = driver.event(), driver.event()
        self._begun: tuple[int, Tensor] | None = None  # layer, its precisions

    @abstractmethod
    def _copies(self, layer: int) -> Staged:
        """Where those of this layer go."""

    def joined(self, layer: int | None = None, code: Tensor | None = None) -> Staged | None:
        """The copies of this layer at these precisions, if they have been begun; whatever has been
        is over then, for what is launched from now on."""
        begun, self._begun = self._begun, None
        if begun is None:
            return None
        self._follow_here()
        return self._copies(begun[0]) if begun[0] == layer and begun[1] is code else None

    def close(self) -> None:
        self._driver.destroy([self._stream], [self._fork, self._join])

    def _follow_launches(self) -> None:
        """What is put on the stream from now on waits for what has been launched."""
        self._driver.follow(self._stream, self._driver.launching(), self._fork)

    def _follow_here(self) -> None:
        """What is launched from now on waits for what is on the stream."""
        self._driver.follow(self._driver.launching(), self._stream, self._join)
