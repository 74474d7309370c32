"""A name → implementation table, one for each place where implementations swap."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from moet.errors import ConfigError

T = TypeVar("T")


class Registry(Generic[T]):
    """Named implementations of one interface.

    Args:
        kind: what is registered, as it should read in an error ("policy", "operator").
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator: adds its target under `name`; a name can be taken once."""

        def add(entry: T) -> T:
            if name in self._entries:
                raise ValueError(f"{self._kind} {name!r} is registered twice")
            self._entries[name] = entry
            return entry

        return add

    def __getitem__(self, name: str) -> T:
        try:
            return self._entries[name]
        except KeyError:
            raise ConfigError(
                f"unknown {self._kind} {name!r}.", f"Choose one of: {', '.join(sorted(self))}."
            ) from None

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)
