"""The residency manager: the one owner of a rank's slots, address tables and counters."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moet.closing import Closing
from moet.errors import ConfigError, ResidencyError
from moet.formats.layout import Precision
from moet.pack.source import RowKey, RowSource
from moet.residency.backend import HostBackend, SlotBackend
from moet.residency.heat import Heat, HeatKeeper, load_heat
from moet.residency.hot_set import HotSet, HotSetOptions
from moet.residency.lease import Lease
from moet.residency.metrics import Counters, LatencyHistogram, Metrics, Phase
from moet.residency.policy import POLICIES
from moet.residency.pool import Mask, SlotPool
from moet.residency.prefetch import Prefetch
from moet.residency.reader import ReadResult, RowReader
from moet.residency.recorder import TraceRecorder


class ResidencyManager(Closing):
    """Brings rows to where kernels read them, one layer at a time.

    All bookkeeping is done by the thread that holds the lease. I/O threads fill slots and report
    through futures; no other state is shared with them, so the forward path has no lock.

    Args:
        source: the rows. precision: of every expert of every layer that this rank computes, by the
            model's index of the layer.
        slots: of each precision's pool (`sizing.size_pool` makes them from a setting).
        recovery: by layer, a precision that all its experts can be leased at besides their own.
            Those rows are kept by how they are used themselves, by the same policy.
        hot_set: experts that are used most run at recovery's precision; nothing else may then.
        streaming: slots of each pool that rows pass through without evicting what decode keeps;
            none in a pool with room for all rows.
        backend: the memory; host memory by default. policy: a name in `POLICIES`.
        half_life: steps in which heat halves (also the LFU policy's memory).
        io_threads: rows read at once.
        heat_path: where heat outlives a restart; None: nowhere.
        trace_path: where to record which experts each step uses; None: nowhere. Recovery's leases
            are not recorded.
        progress: called with (rows loaded, rows to load) while the pools are filled.

    Fills the pools before it returns: with all rows where they fit, else by the heat file if there
    is one. Raises ConfigError for settings that cannot work, and what the source raises for a row
    that cannot be read.
    """

    def __init__(
        self,
        source: RowSource,
        precision: Mapping[int, Sequence[Precision]],
        slots: Mapping[Precision, int],
        *,
        recovery: Mapping[int, Precision] | None = None,
        hot_set: HotSetOptions | None = None,
        streaming: int = 8,
        backend: SlotBackend | None = None,
        policy: str = "lru",
        half_life: float = 1024,
        io_threads: int = 4,
        heat_path: Path | None = None,
        trace_path: Path | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        if streaming < 1 or io_threads < 1:
            raise ConfigError("streaming slots and I/O threads must each be at least 1.")
        self.layers = tuple(sorted(precision))
        self.num_experts = source.num_experts
        self._index = {layer: index for index, layer in enumerate(self.layers)}
        names = _names(precision, source)
        again = names if recovery is None else _names(_every(recovery, source), source)
        present = tuple(p for p in Precision if (names == p).any() or (again == p).any())
        # [layers, experts]: by each expert's own precision, and by that of recovery.
        self._pool_of, self._recovery_of = (_numbers(of, present) for of in (names, again))
        self._recovers = recovery is not None
        loaded = None
        if heat_path is not None:
            loaded = load_heat(heat_path, source.identity, self.layers, self.num_experts)
        self._heat = Heat(np.zeros(names.shape) if loaded is None else loaded, half_life)
        self._policy = POLICIES[policy](self._heat)
        # Of their own, or experts that the base often needs would push out rows that recovery does.
        self._recovery_heat = Heat(np.zeros(names.shape), half_life)
        self._recovery_policy = POLICIES[policy](self._recovery_heat)
        zero = {(name, phase): 0 for name in present for phase in Phase}
        self._counters = Counters(hits=dict(zero), misses=zero)
        self._step = -1
        self._step_missed = False
        self._leased = threading.Lock()
        self._closed = False
        self._backend = HostBackend() if backend is None else backend
        self._reader = RowReader(source, self._backend, io_threads)
        self._keeper: HeatKeeper | None = None
        if heat_path is not None:
            self._keeper = HeatKeeper(
                self._heat, heat_path, source.identity, self.layers, self._reader.background
            )
        self._recorder: TraceRecorder | None = None
        if trace_path is not None:
            self._recorder = TraceRecorder(
                trace_path,
                self.layers,
                self.num_experts,
                source.layouts[present[0]].row_bytes,
                self._reader.background,
            )
        try:
            self._pools = [
                SlotPool(
                    name,
                    (names == name) | (again == name),
                    slots.get(name, 0),
                    streaming if hot_set is None or name in names else 0,
                    source.layouts[name].row_bytes,
                    self._backend,
                )
                for name in present
            ]
            self._prefetch = Prefetch(self._pools, self._key, self._reader, self._counters)
            self._hot_set: HotSet | None = None
            if hot_set is not None:
                self._hot_set = self._make_hot_set(hot_set, self._hot_pool(names))
            self._fill(warm=loaded is not None, progress=progress)
        except BaseException:
            self._reader.close()
            self._backend.close()
            raise

    @contextmanager
    def lease(
        self, layer: int, *, decode: ArrayLike, scan: ArrayLike, recovery: bool = False
    ) -> Iterator[Lease]:
        """The rows of one layer, as waves: `with m.lease(…) as lease: for wave in lease: …`.

        A lease of the rank's first layer begins a step, unless it is of recovery. The experts
        needed by both count as decode's. One lease at a time.

        Args:
            layer: the model's index. decode, scan: ids of the experts that tokens being decoded
                need, and that only prompt tokens need; integers in any order.
            recovery: rows at recovery's precision, not at each expert's own.

        Raises ResidencyError for a layer or an expert that does not exist.
        """
        if recovery and (not self._recovers or self._hot_set is not None):
            raise ResidencyError("recovery's rows are asked for, and this manager leases none.")
        index = self._index.get(layer)
        if index is None:
            raise ResidencyError(f"layer {layer} has no routed experts on this rank.")
        decoded = self._mask(layer, decode)
        experts = (decoded | self._mask(layer, scan)).nonzero()[0]
        self._hold("a lease is asked for")
        if index == 0 and not recovery:
            self._begin_step()
        used = decoded.nonzero()[0]
        heat = self._recovery_heat if recovery else self._heat
        policy = self._recovery_policy if recovery else self._policy
        heat.touch(index, used, self._step)
        policy.touch(index, used, self._step)
        if self._recorder is not None and not recovery:
            self._recorder.use(index, used, experts[~decoded[experts]])
        self._prefetch.forget(index)
        lease = Lease(
            experts,
            index * self.num_experts + experts,
            decoded[experts],
            (self._recovery_of if recovery else self._pool_of)[index, experts],
            self._pools,
            policy,
            self._key,
            self._reader,
            self._backend,
            self._counters,
            self._prefetch,
        )
        self._step_missed |= lease.misses > 0
        try:
            yield lease
        finally:
            # Not released if this is interrupted: a read may still be running then.
            lease.finish()
            self._prefetch.end(index)
            self._leased.release()

    def prefetch(self, experts: Mapping[int, ArrayLike]) -> None:
        """Begins to read rows that the next leases of these layers will ask for.

        What was asked for before is given up. experts: by the model's index of the layer, ids in
        any order; layers that this rank does not have are passed over. A row that cannot be read
        fails the lease that needs it, no other.

        Raises ResidencyError for an expert that does not exist, and while a lease is held.
        """
        wanted = {
            self._index[layer]: self._mask(layer, ids).nonzero()[0]
            for layer, ids in sorted(experts.items())
            if layer in self._index
        }
        self._hold("rows are asked for ahead")
        try:
            self._prefetch.ask(
                (index, int(self._pool_of[index, expert]), index * self.num_experts + expert)
                for index, ids in wanted.items()
                for expert in ids.tolist()
            )
        finally:
            self._leased.release()

    @property
    def all_in_memory(self) -> bool:
        """Whether every pool has room for all its rows."""
        return all(pool.slots == len(pool.rows) for pool in self._pools)

    def address_table(self, precision: Precision) -> NDArray[np.int64]:
        """Read-only view, int64 [layers, experts]: where each row is; 0 = not resident."""
        pool = next(pool for pool in self._pools if pool.precision == precision)
        view = pool.address.view()
        view.flags.writeable = False
        return view

    def metrics(self) -> Metrics:
        """The counts so far; those of a lease that is held may be partly in."""
        c = self._counters
        return Metrics(
            steps=c.steps,
            steps_without_miss=c.steps_without_miss,
            hits=dict(c.hits),
            misses=dict(c.misses),
            memory_bytes=c.memory_bytes,
            disk_bytes=c.disk_bytes,
            stall_seconds=c.stall_seconds,
            evictions=sum(pool.evictions for pool in self._pools),
            promotions=sum(pool.promotions for pool in self._pools),
            prefetched_rows=self._prefetch.count,
            waves=c.waves,
            read_errors=c.read_errors,
            disk_latency=LatencyHistogram(tuple(c.latency_counts), c.latency_seconds),
            pools={pool.precision: pool.metrics() for pool in self._pools},
        )

    @property
    def hot_set(self) -> HotSet | None:
        """The adaptive hot set, if there is one."""
        return self._hot_set

    def close(self) -> None:
        """Stops the threads, saves the heat, frees the memory. Can be called twice."""
        if self._closed:
            return
        if not self._leased.acquire(blocking=False):
            raise ResidencyError("the manager is closed while a lease is held.")
        self._closed = True
        self._leased.release()
        self._end_step()
        self._reader.close()
        if self._keeper is not None:
            self._keeper.close(self._step)
        if self._recorder is not None:
            self._recorder.close()
        self._backend.wait(self._counters.waves)
        self._backend.close()

    def _hold(self, what: str) -> None:
        """Nothing else may be done with the pools until `_leased` is released."""
        if not self._leased.acquire(blocking=False):
            raise ResidencyError(f"{what} while a lease is held.")
        if self._closed:
            self._leased.release()
            raise ResidencyError(f"{what} after the manager was closed.")

    def _fill(self, warm: bool, progress: Callable[[int, int], None] | None) -> None:
        """Reads the rows to begin with; the first that fails ends it with its error."""
        reads = [
            (pool, slot, self._reader.start(self._key(row, pool.precision), slot))
            for pool in self._pools
            if self._hot_set is None or pool is not self._hot_set.pool
            if warm or pool.slots == len(pool.rows)
            for row, slot in pool.preload(self._heat.log.reshape(-1))
        ]
        for done, (pool, slot, read) in enumerate(reads, 1):
            self._counters.add_read(read.result())
            pool.publish(slot)
            if progress is not None:
                progress(done, len(reads))

    def _begin_step(self) -> None:
        self._end_step()
        self._step += 1
        self._step_missed = False
        if self._hot_set is not None:
            self._hot_set.begin_step(self._step, self._heat.log.reshape(-1))

    def _end_step(self) -> None:
        if self._step < 0:
            return
        self._counters.steps += 1
        self._counters.steps_without_miss += not self._step_missed
        if self._keeper is not None:
            self._keeper.end_step(self._step)
        if self._recorder is not None:
            self._recorder.end_step()

    def _hot_pool(self, names: NDArray[np.str_]) -> int:
        """The number of the pool that holds nothing but hot rows. names: of each expert's own."""
        numbers = set(self._recovery_of.reshape(-1).tolist())
        if len(numbers) > 1 or (names == self._pools[next(iter(numbers))].precision).any():
            raise ConfigError(
                "an adaptive hot set needs all experts at base precision, and one FP4 format.",
                "Set precision to base, without draft layers.",
            )
        return int(numbers.pop())

    def _make_hot_set(self, options: HotSetOptions, number: int) -> HotSet:
        pool, own = self._pools[number], self._pool_of.copy().reshape(-1)

        def assign(rows: NDArray[np.int64], hot: bool) -> None:
            self._pool_of.reshape(-1)[rows] = number if hot else own[rows]

        def read(row: int, slot: int) -> Future[ReadResult]:
            return self._reader.start(self._key(row, pool.precision), slot)

        return HotSet(options, pool, read, assign, self._counters)

    def _key(self, row: int, precision: Precision) -> RowKey:
        index, expert = divmod(row, self.num_experts)
        return RowKey(self.layers[index], expert, precision)

    def _mask(self, layer: int, experts: ArrayLike) -> Mask:
        """True for `experts`: bool [num_experts]."""
        ids, mask = np.asarray(experts), np.zeros(self.num_experts, np.bool_)
        if ids.size:
            # Not left to indexing, where −1 would be the last expert.
            low, high = int(ids.min()), int(ids.max())
            if low < 0 or high >= self.num_experts:
                raise ResidencyError(
                    f"layer {layer} has experts 0 to {self.num_experts - 1}, not "
                    f"{low if low < 0 else high}."
                )
            mask[ids] = True
        return mask


def _names(precision: Mapping[int, Sequence[Precision]], source: RowSource) -> NDArray[np.str_]:
    """The precision of every row, [layers, experts]; raises ConfigError where there is none."""
    for layer, row in precision.items():
        if layer not in source.layers:
            raise ConfigError(f"layer {layer} is not in the pack.")
        if len(row) != source.num_experts:
            raise ConfigError(
                f"layer {layer} has {source.num_experts} experts, and {len(row)} precisions."
            )
        for expert, name in enumerate(row):
            if name not in source.layouts:
                raise ConfigError(
                    f"layer {layer}, expert {expert}: the pack has no {name} rows.",
                    f"It has {', '.join(source.layouts)}.",
                )
    return np.array([precision[layer] for layer in sorted(precision)], dtype=np.str_)


def _every(recovery: Mapping[int, Precision], source: RowSource) -> dict[int, list[Precision]]:
    """One precision a layer as one an expert."""
    return {layer: [precision] * source.num_experts for layer, precision in recovery.items()}


def _numbers(names: NDArray[np.str_], present: Sequence[Precision]) -> NDArray[np.int8]:
    """Positions in `present`, [layers, experts]."""
    numbers = np.zeros(names.shape, np.int8)
    for number, name in enumerate(present):
        numbers[names == name] = number
    return numbers
