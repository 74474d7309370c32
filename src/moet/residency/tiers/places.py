"""The places of one tier: which are free, taken, or given up but perhaps still read."""

from __future__ import annotations

from collections.abc import Container


class Places:
    """Bookkeeping of the places 0 … count − 1 of one tier.

    A place is *free*, *taken* by a row (being filled, or holding it), or *retired*: its row has
    another place or none now, but steps up to an epoch may still read the old one. A place at
    `limit` or above is *leaving*: it is given up as soon as it is free (see `Shrink`), and taken
    only by requests that find no other.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.limit = count
        self.row_in = [-1] * count  # by place; −1: free or retired
        self._free = list(range(count))[::-1]  # a stack of those below the limit
        self._leaving: list[int] = []
        self._retired: dict[int, tuple[int, int]] = {}  # place → (row, epoch)

    @property
    def free(self) -> int:
        """Free places below the limit."""
        return len(self._free)

    @property
    def spare(self) -> int:
        """Free places, leaving ones included."""
        return len(self._free) + len(self._leaving)

    @property
    def retired(self) -> int:
        return len(self._retired)

    @property
    def used(self) -> int:
        """Taken or retired places."""
        return self.count - self.spare

    def take(self, row: int, leaving: bool = False) -> int | None:
        """A free place for `row`, of the leaving ones too if allowed; None if there is none."""
        if self._free:
            index = self._free.pop()
        elif leaving and self._leaving:
            index = self._leaving.pop()
        else:
            return None
        self.row_in[index] = row
        return index

    def give(self, index: int) -> None:
        """A taken place is free at once: no table entry ever pointed to it."""
        self.row_in[index] = -1
        (self._free if index < self.limit else self._leaving).append(index)

    def retire(self, index: int, row: int, epoch: int) -> None:
        """A taken place is free when step `epoch` is done; `row` was in it."""
        self.row_in[index] = -1
        self._retired[index] = (row, epoch)

    def reclaim(self, done: int, present: Container[int] | None) -> bool:
        """Frees retired places that nothing reads; whether there were any.

        Args:
            done: the newest finished step.
            present: while the GPU waits for an answer, the only rows whose places it still uses.
        """
        over = [
            index
            for index, (row, epoch) in self._retired.items()
            if epoch <= done or (present is not None and row not in present)
        ]
        for index in over:
            del self._retired[index]
            self.give(index)
        return bool(over)

    def grow(self, count: int) -> None:
        """The device has made places up to `count`."""
        self.row_in += [-1] * (count - self.count)
        self._free[:0] = range(self.count, count)[::-1]
        self.count = self.limit = count

    def leave(self, limit: int) -> None:
        """The places from `limit` on are to be given up."""
        self.limit = limit
        self._leaving += [index for index in self._free if index >= limit]
        self._free = [index for index in self._free if index < limit]

    @property
    def left(self) -> bool:
        """Whether all leaving places are free."""
        return len(self._leaving) == self.count - self.limit

    def cut(self) -> None:
        """The leaving places, all free, are gone."""
        assert self.left, "a place that is in use is given up"
        self._leaving.clear()
        del self.row_in[self.limit :]
        self.count = self.limit
