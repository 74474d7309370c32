"""Tiered expert residency of one rank: GPU memory ← pinned arena ← pack on disk."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moet.closing import Closing
from moet.errors import ConfigError, ResidencyError
from moet.formats.layout import Precision
from moet.pack.source import RowSource
from moet.residency.heat import Heat, HeatKeeper, load_heat
from moet.residency.metrics import LatencyHistogram, Phase
from moet.residency.tiers.device import Tier, TierDevice
from moet.residency.tiers.metrics import TierMetrics, TierUse
from moet.residency.tiers.options import Limits, TierOptions, TierSizes, check_sizes
from moet.residency.tiers.owner import Kind, Owner
from moet.residency.tiers.planner import Planner
from moet.residency.tiers.reads import RowReads
from moet.residency.tiers.rows import RowTiers
from moet.residency.tiers.table import TableWriter


class TieredResidency(Closing):
    """Keeps rows where steps can read them, and brings what a step waits for from disk.

    `start` gives all state to one owner thread; until then (and in tests) `poll` does its work in
    the caller's thread. The other methods may be called from any thread.

    Args:
        source: the rows. layers: the model's indices of this rank's layers, in the table's order.
        rows: which rows there are, by precision, bool [layers, experts]. An expert may have rows
            of several precisions.
        sizes: of the tiers, by precision. device: the memory, the table, the steps.
        heat_path: where heat outlives a restart, a file for each precision: `NAME.PRECISION.EXT`.
        heat: decayed counts to begin with, by precision, float [layers, experts], where there is
            no heat file.
        executor: runs reads; `options.io_threads` threads by default.

    Raises ConfigError for sizes that cannot work; the device is closed then, as `close` does.
    """

    def __init__(
        self,
        source: RowSource,
        layers: Sequence[int],
        rows: Mapping[Precision, NDArray[np.bool_]],
        sizes: Mapping[Precision, TierSizes],
        device: TierDevice,
        options: TierOptions,
        *,
        heat_path: Path | None = None,
        heat: Mapping[Precision, NDArray[np.floating]] | None = None,
        executor: Executor | None = None,
    ) -> None:
        self.layers = tuple(layers)
        self._device = device
        self._kinds: dict[Precision, Kind] = {}
        with ExitStack() as failure:
            failure.callback(device.close)
            limits = self._limits(source, rows, sizes, options)
            if executor is None:
                executor = ThreadPoolExecutor(options.io_threads, thread_name_prefix="moet-io")
            self._reads = RowReads(source, self.layers, executor)
            failure.callback(self._reads.close)
            table = TableWriter(device)
            for p, owned in rows.items():
                path, identity = None, f"{source.identity}:{p}"
                counts = (heat or {}).get(p, np.zeros(owned.shape))
                if heat_path is not None:
                    path = heat_path.with_name(f"{heat_path.stem}.{p}{heat_path.suffix}")
                    saved = load_heat(path, identity, self.layers, source.num_experts)
                    counts = counts if saved is None else saved
                decayed = Heat(counts, options.half_life)
                row_bytes = source.layouts[p].row_bytes
                tiers = RowTiers(p, owned, sizes[p], row_bytes, device, table, self._reads)
                planner = Planner(tiers, decayed, options, limits[p])
                self._kinds[p] = Kind(tiers, planner, np.zeros(owned.shape, np.int64))
                if path is not None:
                    run = self._reads.background
                    self._kinds[p].keeper = HeatKeeper(decayed, path, identity, self.layers, run)
            self._owner = Owner(device, table, self._kinds, self.layers, options)
            failure.pop_all()
        self._stop = False
        self._closed = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the owner thread."""
        if self._thread is not None or self._closed:
            raise ResidencyError("residency is started twice, or after it was closed.")
        self._thread = threading.Thread(target=self._run, name="moet-residency", daemon=True)
        self._thread.start()

    def poll(self) -> bool:
        """One round of the owner's work, in its thread; whether there was any. Never blocks."""
        return self._owner.round()

    def preload(
        self,
        progress: Callable[[int, int], None] | None = None,
        precisions: Collection[Precision] | None = None,
    ) -> None:
        """Fills the tiers by heat, before the first step; the owner thread runs.

        progress: called with (rows loaded, rows to load) now and then. precisions: None: all.
        Raises what the source raises for a row that cannot be read.
        """
        futures = self.begin_preload(precisions)
        for future in futures:
            while True:
                with suppress(FutureTimeout):
                    future.result(timeout=0.2)
                if progress is not None:
                    loaded = [kind.loaded for kind in self._kinds.values()]
                    progress(sum(seen for seen, _ in loaded), sum(total for _, total in loaded))
                if future.done():
                    break

    def begin_preload(self, precisions: Collection[Precision] | None = None) -> list[Future[None]]:
        """As `preload`, without waiting: a future for each precision."""
        chosen = self._kinds if precisions is None else precisions
        return [self._submit(partial(self._owner.load, p)) for p in chosen]

    def fetch(self, precision: Precision, rows: Sequence[int], failed: set[int]) -> Future[None]:
        """Starts to bring in rows that steps will soon ask for, beside the steps.

        rows: flat indices, layer index · experts + expert. failed: those that could not be read are
        added, by the owner thread. The future says that it has begun.
        """
        return self._submit(partial(self._owner.fetch, precision, rows, failed))

    def resize(self, precision: Precision, sizes: TierSizes) -> Future[None]:
        """Gives the tiers of a precision other sizes while steps run.

        The future is resolved when places that are given up have been given back; it raises
        ConfigError for sizes that cannot work (nothing has changed then, or not enough memory was
        there to grow), ResidencyError while an earlier change is under way.
        """
        if precision not in self._kinds:
            raise ConfigError(f"there are no {precision} rows.")
        return self._submit(partial(self._owner.resize, precision, sizes))

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """No table entry changes and no copy or read runs inside, as graph capture needs it.

        Waits for the step that runs and what is in flight. No step may be waited for inside: its
        request would not be answered before the end. May be nested.
        """
        self.begin_quiet().result()
        try:
            yield
        finally:
            self.end_quiet().result()

    def begin_quiet(self) -> Future[None]:
        """As `quiet`, without waiting; must be followed by `end_quiet` once it is resolved."""
        return self._submit(self._owner.begin_quiet)

    def end_quiet(self) -> Future[None]:
        return self._submit(self._owner.end_quiet)

    @property
    def all_in_memory(self) -> bool:
        """Whether steps that begin now find all rows, unless one is dropped meanwhile."""
        return all(kind.rows.all_in_memory for kind in self._kinds.values())

    def failure(self, step: int) -> Exception | None:
        """Why a step failed (of the last 256 that did); None if it did not."""
        return self._owner.failure(step)

    def metrics(self) -> TierMetrics:
        """The counts so far."""
        counts, c = self._device.counts(), self._owner.counters
        hits = {
            (p, phase, tier): int(counts.rows[p, phase][tier])
            for p in self._kinds
            for phase in Phase
            for tier in Tier
        }
        rows = {p: kind.rows for p, kind in self._kinds.items()}
        return TierMetrics(
            steps=counts.steps,
            steps_local=counts.steps_local,
            hits=hits,
            hit_bytes={key: count * rows[key[0]].row_bytes for key, count in hits.items()},
            disk_reads=c.disk_reads,
            disk_bytes=c.disk_bytes,
            disk_latency=LatencyHistogram(tuple(c.latency_counts), c.latency_seconds),
            read_errors=sum(r.counts.read_errors for r in rows.values()),
            stall_seconds=c.stall_seconds,
            requests=c.requests,
            failed_requests=c.failed_requests,
            promotions=sum(r.counts.promotions for r in rows.values()),
            demotions=sum(r.counts.demotions for r in rows.values()),
            evictions=sum(r.counts.evictions for r in rows.values()),
            prefetched_rows=sum(kind.prefetch.count for kind in self._kinds.values()),
            tiers={
                (p, tier): TierUse(r.places(tier).count, r.places(tier).used, r.row_bytes)
                for p, r in rows.items()
                for tier in (Tier.GPU, Tier.ARENA)
            },
        )

    def close(self) -> None:
        """Stops the threads, saves the heat, frees the memory. No step runs any more."""
        if self._closed:
            return
        self._closed = self._stop = True
        if self._thread is not None:
            self._thread.join()
        self._reads.close()
        for kind in self._kinds.values():
            for _, copy in kind.rows.moving.values():
                with suppress(Exception):  # a copy that failed has ended too
                    while not copy.done():
                        time.sleep(1e-3)
            if kind.keeper is not None:
                kind.keeper.close(self._device.done())
        self._owner.close()
        self._device.close()

    def _limits(
        self,
        source: RowSource,
        rows: Mapping[Precision, NDArray[np.bool_]],
        sizes: Mapping[Precision, TierSizes],
        options: TierOptions,
    ) -> dict[Precision, Limits]:
        """By precision; raises ConfigError for rows or sizes that cannot work."""
        for precision, owned in rows.items():
            if precision not in source.layouts or precision not in sizes:
                raise ConfigError(f"there are no {precision} rows, or no sizes for them.")
            if owned.shape != (len(self.layers), source.num_experts):
                raise ConfigError(
                    f"{precision} rows: {owned.shape} instead of "
                    f"{(len(self.layers), source.num_experts)} layers and experts."
                )
        return {
            p: check_sizes(p, owned, sizes[p], source.layouts[p].row_bytes, options)
            for p, owned in rows.items()
        }

    def _submit(self, command: Callable[[Future[None]], None]) -> Future[None]:
        if self._closed:
            raise ResidencyError("residency has been closed.")
        return self._owner.submit(command)

    def _run(self) -> None:
        while not self._stop:
            if not self._owner.round():
                self._owner.wait()
