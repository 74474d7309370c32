"""Things that are used in a `with` statement, at whose end they are closed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Closing(ABC):
    """Closed when its `with` block ends, also by an error."""

    @abstractmethod
    def close(self) -> None:
        """Gives back what it holds. A second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
