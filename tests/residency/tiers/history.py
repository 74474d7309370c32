"""One random history of a manager on the simulated device, and what must hold in it."""

from __future__ import annotations

import itertools
from collections import Counter
from concurrent.futures import Future
from random import Random

import numpy as np

from moet.errors import ConfigError, PackError, ResidencyError
from moet.pack.source import RowKey
from moet.residency.metrics import Phase
from moet.residency.policy import POLICIES
from moet.residency.tiers import Tier, TieredResidency, TierOptions, TierSizes
from moet.residency.tiers.options import check_sizes

from .sim import BASE, FP4, SimDevice, SimSource, Step, code

PATIENCE = 30_000  # rounds; far more than any history needs


class History:
    """Everything is drawn from one seed.

    Attributes:
        honest: the manager has been told how many rows a step can use, so that no step may fail
            for want of room.
    """

    def __init__(self, seed: int) -> None:
        self.rng = rng = Random(seed)
        self.layers = rng.randint(1, 3)
        self.experts = rng.randint(2, 6)
        self.source = SimSource(range(3, 3 + self.layers), self.experts)
        self.device = SimDevice(self.layers, self.experts, rng)
        self.device.hints = rng.random() < 0.5
        self.honest = rng.random() < 0.8
        self.top = rng.randint(1, self.experts)  # the most rows of a layer in a step
        self.rows = self._owned()
        self.options = TierOptions(
            policy=rng.choice(sorted(POLICIES)),
            half_life=rng.choice((1, 8, 100)),
            margin=rng.choice((0, 0.25, 2)),
            plan_every=rng.randint(1, 3),
            max_moves=rng.randint(1, 6),
            streaming=rng.choice((None, 0, 2)),
            io_threads=rng.randint(1, 3),
            layer_rows=self.top if self.honest else 1,
        )
        self.manager = self._manager()
        self.quiet: Future[None] | None = None
        self.resizes: list[Future[None]] = []
        self.faults = False
        self.used: Counter[Phase] = Counter()

    def run(self) -> None:
        rng, device = self.rng, self.device
        if rng.random() < 0.4:
            loads = self.manager.begin_preload()
            if rng.random() < 0.7:
                self._until(lambda: all(load.done() for load in loads))
                for load in loads:
                    load.result()
        device.disk_speed = rng.choice((0.1, 0.5, 1))
        device.launch([self._step() for _ in range(rng.randint(1, 5))])
        calm = rng.random() < 0.3
        for _ in range(PATIENCE):
            if device.gpu_over:
                break
            if rng.random() < 0.3:
                self._poll()
            else:
                device.tick()
            if not calm and rng.random() < 0.03:
                self._event()
        else:
            raise AssertionError("a request waits for ever")
        self._end()

    def _poll(self) -> bool:
        busy = self.manager.poll()
        if error := self.manager._owner._broken:
            raise error
        return busy

    def _owned(self) -> dict:
        rng, shape = self.rng, (self.layers, self.experts)
        kind = rng.choice(("base", "base", "mixed", "both"))
        if kind == "base":
            return {BASE: np.ones(shape, np.bool_)}
        if kind == "both":
            return {BASE: np.ones(shape, np.bool_), FP4: np.ones(shape, np.bool_)}
        fp4 = np.array([[rng.random() < 0.5 for _ in range(self.experts)] for _ in range(shape[0])])
        return {BASE: ~fp4, FP4: fp4}

    def _sizes(self) -> TierSizes:
        rng, rows = self.rng, self.layers * self.experts
        if rng.random() < 0.4:  # just enough for a step that uses as many rows as it may
            places = rng.randint(2, self.top + 2)
            return TierSizes(self.top + 2 - places, places)
        return TierSizes(rng.randint(0, rows), rng.randint(1, rng.choice((4, rows + 4))))

    def _manager(self) -> TieredResidency:
        """Draws sizes until they are accepted: some are refused."""
        while True:
            sizes = {precision: self._sizes() for precision in self.rows}
            try:
                for p, owned in self.rows.items():
                    row_bytes = self.source.layouts[p].row_bytes
                    check_sizes(p, owned, sizes[p], row_bytes, self.options)
            except ConfigError as error:
                if "Make the arena at least" not in error.hint:
                    raise
                continue
            return TieredResidency(
                self.source,
                self.source.layers,
                self.rows,
                sizes,
                self.device,
                self.options,
                executor=self.device.executor,
            )

    def _step(self) -> Step:
        rng = self.rng
        phase = rng.choice((Phase.DECODE, Phase.DECODE, Phase.DECODE, Phase.SCAN))
        layers = []
        for layer in range(self.layers):
            used = {}
            tables = list(self.rows) if rng.random() < 0.8 else [rng.choice(list(self.rows))]
            for precision in tables:
                candidates = np.flatnonzero(self.rows[precision][layer]).tolist()
                top = min(self.top, len(candidates))
                full = phase == Phase.SCAN or rng.random() < 0.4
                count = top if full else rng.randint(0, top)
                used[precision] = rng.sample(candidates, count)
                self.used[phase] += count
            layers.append((layer, used))
        return phase, layers

    def _event(self) -> None:
        rng, source = self.rng, self.source
        choice = rng.random()
        if choice < 0.3:
            precision = rng.choice(list(self.rows))
            self.device.limit = rng.choice((64, 64, 10))
            self.resizes.append(self.manager.resize(precision, self._sizes()))
        elif choice < 0.6:
            if self.quiet is None:
                self.quiet = self.manager.begin_quiet()
            else:
                self._end_quiet()
        elif choice < 0.8:
            self.faults = True
            source.broken = {
                RowKey(layer, e, precision)
                for layer in source.layers
                for e in range(self.experts)
                for precision in self.rows
                if rng.random() < 0.3
            }
        else:
            source.broken = set()
        if self.quiet is not None and self.quiet.done():
            self.device.capturing = True
        self.device.disk_speed = rng.choice((0.1, 0.5, 1))

    def _end_quiet(self) -> None:
        if self.quiet is not None and self.quiet.done():
            self.device.capturing = False
            self.manager.end_quiet()
            self.quiet = None

    def _until(self, condition) -> None:
        for _ in range(PATIENCE):
            self._poll()
            for _ in range(3):
                self.device.tick()
            if self.quiet is not None:
                self._end_quiet()
            if condition():
                return
        raise AssertionError("nothing goes on any more")

    def _end(self) -> None:
        """Lets everything come to rest, and looks at it."""
        manager, device = self.manager, self.device
        self.source.broken = set()
        self._until(lambda: self.quiet is None and all(future.done() for future in self.resizes))
        device.preempt = False
        idle = itertools.count()
        self._until(lambda: not self._poll() and not self._in_flight() and next(idle) > 3)
        self._check_failures()
        for future in self.resizes:
            error = future.exception()
            assert isinstance(error, ConfigError | ResidencyError | None), repr(error)
        self._check_rest()
        self._check_counts()
        manager.close()
        assert device.closed

    def _in_flight(self) -> bool:
        return manager_in_flight(self.manager) or bool(self.device.executor.jobs)

    def _check_failures(self) -> None:
        for step in self.device.failed:
            error = self.manager.failure(step)
            if isinstance(error, PackError):
                assert self.faults
                assert "checksum" in error.message
            else:
                assert isinstance(error, ResidencyError), error
                assert not self.honest, error
                assert "Make the arena at least" in error.hint

    def _check_rest(self) -> None:
        """Every row is in one place or none, the table agrees, and no place is lost."""
        for precision, kind in self.manager._kinds.items():
            rows = kind.rows
            rows.check()
            assert not rows.moving
            assert not rows.reading
            assert rows.gpu.retired == rows.arena.retired == 0
            if self.honest:
                assert rows.arena.spare >= 1
            resident = 0
            for tier in (Tier.GPU, Tier.ARENA):
                places = rows.places(tier)
                assert places.count == places.limit == self.device.size[precision, tier]
                for slot, row in enumerate(places.row_in):
                    if row >= 0:
                        resident += 1
                        layer, expert = divmod(row, self.experts)
                        place = self.device.table[precision, layer, expert]
                        assert place == (precision, tier, slot)
                        assert self.device._value(place) == code(precision, layer, expert)
            assert resident == sum(row[0] == precision for row in self.device.table)
            passing = np.flatnonzero((rows.tier == Tier.ARENA) & ~rows.kept)
            assert sorted(rows.passing) == passing.tolist()

    def _check_counts(self) -> None:
        now = self.manager.metrics()
        for phase in Phase:
            found = sum(count for (_, p, _), count in now.hits.items() if p == phase)
            assert found == self.used[phase]
        assert now.requests == self.device.requests
        assert now.failed_requests >= len(set(self.device.failed))
        in_memory = sum(use.used for use in now.tiers.values())
        assert in_memory == now.disk_reads - now.evictions
        assert now.disk_reads + now.read_errors == self.source.reads


def manager_in_flight(manager: TieredResidency) -> bool:
    return manager._owner.in_flight


def run_block(seeds: range) -> None:
    for seed in seeds:
        try:
            History(seed).run()
        except BaseException as error:
            error.add_note(f"history {seed}")
            raise
