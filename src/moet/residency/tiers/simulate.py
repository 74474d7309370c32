"""A recorded routing trace × policy × sizes → which tier the rows would have been found in.

The manager itself runs, on a device without bytes whose copies and reads take no time: so what is
predicted are its own decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moet.errors import ConfigError, ResidencyError
from moet.formats.layout import Precision, RowLayout
from moet.pack.source import RowKey, RowSource
from moet.residency.metrics import Phase
from moet.residency.tiers.device import (
    U8,
    Copy,
    Counts,
    Entry,
    Place,
    Request,
    Tier,
    TierDevice,
)
from moet.residency.tiers.manager import TieredResidency
from moet.residency.tiers.metrics import TierMetrics
from moet.residency.tiers.options import TierOptions, TierSizes
from moet.residency.tiers.trace import RoutingTrace

_KIND = Precision.BASE  # of all rows: the trace knows one kind only


@dataclass(frozen=True)
class Simulated:
    """steps: decode steps replayed; steps_local: of these, with all rows in GPU memory. rows: that
    steps used, by phase and tier. promotions, demotions, evictions: as of TierMetrics."""

    steps: int
    steps_local: int
    rows: Mapping[tuple[Phase, Tier], int]
    promotions: int
    demotions: int
    evictions: int

    def share(self, tier: Tier, phase: Phase = Phase.DECODE) -> float:
        """Of the rows that steps of a phase used; 0 if they used none."""
        total = sum(count for (p, _), count in self.rows.items() if p == phase)
        return self.rows[phase, tier] / total if total else 0.0

    def per_step(self, tier: Tier) -> float:
        """Rows of the tier that a decode step uses."""
        return self.rows[Phase.DECODE, tier] / self.steps if self.steps else 0.0


def simulate(
    trace: RoutingTrace, sizes: TierSizes, options: TierOptions, warmup: int = 0
) -> Simulated:
    """Replays a trace.

    Args:
        options: `layer_rows` is taken from the trace.
        warmup: the first steps are not replayed: they make the heat of a warm start.

    As on a device, at most `options.max_moves` rows move during a step; that there is time for
    them is assumed. Raises ConfigError for sizes that cannot work, or a trace that is too short.
    """
    if not 0 <= warmup < max(1, trace.steps):
        raise ConfigError(f"{warmup} warm-up steps leave nothing of {trace.steps} steps.")
    shape = (len(trace.layers), trace.num_experts)
    device = _Device(shape)
    manager = TieredResidency(
        _NoRows(trace),
        trace.layers,
        {_KIND: np.ones(shape, np.bool_)},
        {_KIND: sizes},
        device,
        TierOptions(**(vars(options) | {"layer_rows": trace.layer_rows})),
        heat={_KIND: trace.use(warmup).astype(np.float64)},
        executor=_AtOnce(),
    )
    with manager:
        loads = manager.begin_preload()
        while not all(load.done() for load in loads):
            manager.poll()
        for phase, routing in trace.replay(warmup):
            device.step(phase, routing, manager)
        return _simulated(manager.metrics())


def _simulated(now: TierMetrics) -> Simulated:
    return Simulated(
        steps=now.steps,
        steps_local=now.steps_local,
        rows={(phase, tier): count for (_, phase, tier), count in now.hits.items()},
        promotions=now.promotions,
        demotions=now.demotions,
        evictions=now.evictions,
    )


class _NoRows(RowSource):
    """Rows of no interest."""

    def __init__(self, trace: RoutingTrace) -> None:
        self.layers, self.num_experts = trace.layers, trace.num_experts
        self.layouts = {_KIND: RowLayout(_KIND, 32, 32, 1)}
        self.identity = ""

    def read(self, key: RowKey, out: U8) -> int:
        return 0

    def factors(self, layer: int, precision: Precision) -> NDArray[np.float32]:
        return np.ones((self.num_experts, 3), np.float32)


class _AtOnce(Executor):
    """Runs a job in the caller's thread."""

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(work(*args, **kwargs))
        return future


class _Copied(Copy):
    def done(self) -> bool:
        return True


class _Device(TierDevice):
    """Knows the tier of each row, int8 [layers, experts], and nothing else."""

    def __init__(self, shape: tuple[int, int]) -> None:
        self._tier = np.full(shape, Tier.DISK, np.int8)
        self._use = np.zeros(shape, np.int64)
        self._rows = {(_KIND, phase): np.zeros(3, np.int64) for phase in Phase}
        self._request: Request | None = None
        self._requests = self._begun = self._done = self._steps = self._local = 0
        self._view = np.zeros(0, np.uint8)

    def step(
        self, phase: Phase, routing: Sequence[tuple[int, list[int]]], manager: TieredResidency
    ) -> None:
        """One step; the manager's moves run beside its first layer."""
        self._begun += 1
        while manager.poll():
            pass
        local = True
        for layer, experts in routing:
            tiers = self._tier[layer, experts]
            self._rows[_KIND, phase] += np.bincount(tiers, minlength=3)
            local &= not tiers.any()
            missing = [e for e, t in zip(experts, tiers.tolist(), strict=True) if t == Tier.DISK]
            if missing:
                present = {_KIND: [e for e in experts if e not in missing]}
                self._requests += 1
                self._request = Request(self._requests, layer, {_KIND: missing}, present)
                while self._request is not None:
                    manager.poll()
            if phase == Phase.DECODE:
                self._use[layer, experts] += 1
        self._steps += phase == Phase.DECODE
        self._local += phase == Phase.DECODE and local
        self._done = self._begun

    def resize(self, precision: Precision, tier: Tier, places: int, row_bytes: int) -> None:
        """Nothing: there are no bytes."""

    def view(self, place: Place) -> U8:
        return self._view

    def start_copy(self, source: Place, target: Place) -> Copy:
        return _Copied()

    def publish(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            tier = Tier.DISK if entry.place is None else entry.place.tier
            self._tier[entry.layer, entry.expert] = tier

    def begun(self) -> int:
        return self._begun

    def done(self) -> int:
        return self._done

    def poll(self) -> Request | None:
        return self._request

    def answer(self, number: int, ok: bool) -> None:
        if not ok:
            raise ResidencyError("a simulated step has failed; this is a bug in moet.")
        self._request = None

    def live(self) -> None:
        """Nothing: requests are served by the thread that makes them."""

    def counts(self) -> Counts:
        return Counts(self._steps, self._local, {_KIND: self._use}, self._rows)

    def wait(self, seconds: float, seen: int) -> None:
        """Nothing: nothing takes time."""

    def close(self) -> None:
        """Nothing: there are no bytes."""
