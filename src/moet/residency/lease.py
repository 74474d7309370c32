"""One layer's turn: its experts' rows, brought in and handed out wave by wave."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moet.errors import ResidencyError
from moet.formats.layout import Precision
from moet.pack.source import RowKey
from moet.residency.backend import SlotBackend
from moet.residency.metrics import Counters, Phase
from moet.residency.policy import Policy
from moet.residency.pool import I64, Mask, SlotPool
from moet.residency.prefetch import Prefetch
from moet.residency.reader import ReadResult, RowReader

# Into how many waves a layer's missing rows are cut where there is room for all of them at once:
# more hide more of the disk's time behind the kernels, but each wave is a kernel call.
_WAVES_OF_MISSES = 4


@dataclass(frozen=True)
class Wave:
    """Experts whose rows are resident until the next wave is asked for, or the lease ends.

    epoch: the wave's number. experts: int64 [n], ascending, over all waves of a lease too.
    address: int64 [n], where each row begins. precision: of each row, [n].
    """

    epoch: int
    experts: I64
    address: I64
    precision: list[Precision]


class Lease:
    """The waves of one layer: iterate once. Made by `ResidencyManager.lease`.

    How the waves are cut depends on what is resident, never on timing. A wave begins at the first
    missing row, so that the experts before it are computed while it is read; reads are started in
    ascending order, as far ahead as there are slots.

    Args:
        experts: int64 [n], ascending. rows: their flat indices. decode: which of them decode needs.
        pool_index: int [n], into `pools`. prefetch: has read some of the rows, or still does.
        key: the RowKey of a flat index and a precision, for the source.
    """

    def __init__(
        self,
        experts: I64,
        rows: I64,
        decode: Mask,
        pool_index: NDArray[np.int8],
        pools: Sequence[SlotPool],
        policy: Policy,
        key: Callable[[int, Precision], RowKey],
        reader: RowReader,
        backend: SlotBackend,
        counters: Counters,
        prefetch: Prefetch,
    ) -> None:
        self._experts, self._rows, self._pool_index = experts, rows, pool_index
        self._pools, self._reader, self._backend = pools, reader, backend
        self._key, self._counters, self._prefetch = key, counters, prefetch
        self._reads: dict[int, tuple[int, Future[ReadResult]]] = {}  # position → slot, read
        self._missing = np.zeros(len(rows), np.bool_)
        self._coming = np.zeros(len(rows), np.bool_)
        self._released = 0  # positions before this one have been released
        self._current: tuple[int, int] | None = None  # (end, epoch) of the wave handed out
        limits = [0] * len(pools)
        for index, pool in enumerate(pools):
            mine = (pool_index == index).nonzero()[0]
            if mine.size:
                coming = prefetch.coming(index, rows[mine])
                missing, limits[index] = pool.pin(rows[mine], decode[mine], policy, coming)
                self._coming[mine] = coming
                self._missing[mine] = missing
                self._count(pool, missing, decode[mine])
        self.misses = int(np.count_nonzero(self._missing))
        self._pending = [
            deque((self._missing & (pool_index == index)).nonzero()[0].tolist())
            for index in range(len(pools))
        ]
        self._ends = iter(self._cut(limits))
        self._over: BaseException | None = None  # why there are no more waves

    def __iter__(self) -> Iterator[Wave]:
        return self

    def __next__(self) -> Wave:
        """The next wave; the one before ends.

        Raises what the row source raised (PackError, CheckpointError) for a row of the wave; the
        rows that were read stay usable, and so does the manager.
        """
        if self._over is not None:
            raise self._over
        self._end_wave()
        end = next(self._ends)
        self._start_reads(end)
        if not any(self._pending):
            self._prefetch.start()
        self._over = self._finish_reads(end)
        if self._over is not None:
            raise self._over
        return self._begin_wave(end)

    def finish(self) -> None:
        """Ends the lease, whatever has happened in it: waits for reads, releases all rows."""
        self._over = ResidencyError("a wave is asked for after its lease has ended.")
        self._end_wave()
        for position in list(self._reads):
            self._settle(position)
        self._release(len(self._rows))

    def _cut(self, limits: list[int]) -> list[int]:
        """The end positions of the waves."""
        per_wave = -(-self.misses // _WAVES_OF_MISSES)
        ends, count, passing = [], per_wave, [0] * len(limits)
        for position in self._missing.nonzero()[0].tolist():
            index = self._pool_index[position]
            kept = self._pools[index].kept[self._rows[position]]
            passes = not (kept or self._coming[position])
            if count == per_wave or (passes and passing[index] == limits[index]):
                ends.append(position)
                count, passing = 0, [0] * len(limits)
            count += 1
            passing[index] += passes
        return [end for end in (*ends, len(self._rows)) if end > 0]

    def _start_reads(self, end: int) -> None:
        """Starts reads in ascending order: all before `end`, later ones as far as slots allow."""
        for number, (pool, pending) in enumerate(zip(self._pools, self._pending, strict=True)):
            while pending:
                position = pending[0]
                row = int(self._rows[position])
                read = self._prefetch.take(number, row)
                if read is None:
                    slot = pool.take(row, wait=position < end)
                    if slot is None:
                        break
                    read = slot, self._reader.start(self._key(row, pool.precision), slot)
                pending.popleft()
                self._reads[position] = read

    def _finish_reads(self, end: int) -> BaseException | None:
        """Publishes the rows before `end`; returns the error of the first that failed."""
        positions = sorted(position for position in self._reads if position < end)
        if not positions:
            return None
        start = time.perf_counter()
        errors = [self._settle(position) for position in positions]
        self._counters.stall_seconds += time.perf_counter() - start
        return next((error for error in errors if error is not None), None)

    def _settle(self, position: int) -> BaseException | None:
        """Waits for a read, then publishes its row or frees its slot."""
        slot, future = self._reads[position]
        error = future.exception()  # waits; only after it may the slot be given away
        del self._reads[position]
        pool = self._pool(position)
        if error is None:
            self._counters.add_read(future.result())
            pool.publish(slot)
        else:
            self._counters.read_errors += 1
            pool.discard(slot)
        return error

    def _begin_wave(self, end: int) -> Wave:
        begin = self._released
        self._counters.waves += 1
        epoch = self._counters.waves
        self._current = (end, epoch)
        address = np.empty(end - begin, np.int64)
        index, rows = self._pool_index[begin:end], self._rows[begin:end]
        for number, pool in enumerate(self._pools):
            mine = index == number
            address[mine] = pool.begin_epoch(rows[mine], epoch)
        precision = [self._pools[number].precision for number in index.tolist()]
        return Wave(epoch, self._experts[begin:end], address, precision)

    def _end_wave(self) -> None:
        if self._current is not None:
            end, epoch = self._current
            self._current = None
            self._backend.end_epoch(epoch)
            self._release(end)

    def _release(self, end: int) -> None:
        if end == self._released:
            return
        span = slice(self._released, end)
        self._released = end
        for index, pool in enumerate(self._pools):
            pool.release(self._rows[span][self._pool_index[span] == index])

    def _pool(self, position: int) -> SlotPool:
        return self._pools[int(self._pool_index[position])]

    def _count(self, pool: SlotPool, missing: Mask, decode: Mask) -> None:
        counters = self._counters
        for phase, members in ((Phase.DECODE, decode), (Phase.SCAN, ~decode)):
            misses = int(np.count_nonzero(missing & members))
            hits = int(np.count_nonzero(members)) - misses
            counters.hits[pool.precision, phase] += hits
            counters.misses[pool.precision, phase] += misses
            counters.memory_bytes += hits * pool.row_bytes
