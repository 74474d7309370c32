"""Rows of layers to come, read before their leases ask for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

import numpy as np

from moet.formats.layout import Precision
from moet.pack.source import RowKey
from moet.residency.metrics import Counters
from moet.residency.pool import I64, Mask, SlotPool
from moet.residency.reader import ReadResult, RowReader

Read = tuple[int, Future[ReadResult]]
"""A slot that is being filled."""


class Prefetch:
    """Starts reads between leases and during them; each lease takes over those that it needs.

    A read holds its slot until the lease of its layer has ended, whether it has ended itself or
    not: so what is resident never depends on timing. It takes an idle slot, and of a pool at most
    `streaming − 1` at a time, which leaves every lease what it needs (see `SlotPool.pin`).

    Attributes:
        count: reads that were started.
    """

    def __init__(
        self,
        pools: Sequence[SlotPool],
        key: Callable[[int, Precision], RowKey],
        reader: RowReader,
        counters: Counters,
    ) -> None:
        self.count = 0
        self._pools, self._key, self._reader, self._counters = pools, key, reader, counters
        self._todo: list[deque[tuple[int, int]]] = [deque() for _ in pools]
        self._reads: list[dict[int, tuple[int, Read]]] = [{} for _ in pools]

    def ask(self, rows: Iterable[tuple[int, int, int]]) -> None:
        """Reads these as far as there is room, the others as soon as there is.

        What was asked for before and not used is given up. rows: (layer, pool's number, flat
        index), in the order of their use.
        """
        self.forget(None)
        self.end(None)
        for layer, number, row in rows:
            if not self._pools[number].resident(row):
                self._todo[number].append((layer, row))
        self.start()

    def start(self) -> None:
        """Starts what there is room for now."""
        for pool, todo, reads in zip(self._pools, self._todo, self._reads, strict=True):
            while todo and len(reads) < pool.streaming - 1:
                layer, row = todo[0]
                if not (pool.resident(row) or row in reads):
                    slot = pool.take(row, wait=False)
                    if slot is None:
                        break
                    reads[row] = (
                        layer,
                        (slot, self._reader.start(self._key(row, pool.precision), slot)),
                    )
                    self.count += 1
                todo.popleft()

    def coming(self, number: int, rows: I64) -> Mask:
        """Which of these rows of a pool are being read."""
        return np.isin(rows, list(self._reads[number]))

    def held(self, pool: SlotPool) -> int:
        """Slots of a pool that are being filled."""
        return len(self._reads[self._pools.index(pool)])

    def take(self, number: int, row: int) -> Read | None:
        """Hands over the read of a row, if there is one."""
        found = self._reads[number].pop(row, None)
        return None if found is None else found[1]

    def forget(self, layer: int | None) -> None:
        """Starts no more reads for this layer, or for any: its lease reads what it needs."""
        for number, todo in enumerate(self._todo):
            self._todo[number] = deque(
                wanted for wanted in todo if layer is not None and wanted[0] != layer
            )

    def end(self, layer: int | None) -> None:
        """Waits for reads for this layer, or for any, that no lease has taken over."""
        for pool, reads in zip(self._pools, self._reads, strict=True):
            for row, (of, (slot, read)) in list(reads.items()):
                if layer is not None and of != layer:
                    continue
                error = read.exception()  # waits
                del reads[row]
                if error is None:
                    self._counters.add_read(read.result())
                    pool.publish(slot)
                    pool.let_pass(slot)
                else:
                    self._counters.read_errors += 1
                    pool.discard(slot)
