"""One random history of `TieredResidency` on a `CudaTierDevice`: every byte that a step reads is
compared with the row that it should be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from random import Random
from typing import Any

import numpy as np
import torch

from moet.errors import ConfigError, PackError, ResidencyError
from moet.kernels.cuda.shape import PRECISION_CODES
from moet.pack.source import RowKey
from moet.residency.cuda import CudaTierDevice
from moet.residency.metrics import Phase
from moet.residency.policy import POLICIES
from moet.residency.tiers import Place, Tier, TieredResidency, TierOptions, TierSizes
from moet.residency.tiers.options import check_sizes

from .source import BASE, FIRST_LAYER, FP4, ROW_BYTES, RandomRows

# Layers, experts, precisions: few, since kernels are compiled for each.
SHAPES = [(3, 8, [BASE]), (2, 40, [BASE, FP4]), (2, 300, [BASE])]
TOP_K = 2
DECODE_TOKENS = 4


class History:
    """Everything but the timing is drawn from one seed. steps: makes what runs on the device."""

    def __init__(self, seed: int, steps: Callable[..., Any]) -> None:
        self.rng = rng = Random(seed)
        self.layers, self.experts, precisions = rng.choice(SHAPES)
        self.source = RandomRows(self.layers, self.experts, precisions, seed)
        codes = [PRECISION_CODES[p] for p in precisions]
        chosen = [[rng.choice(codes) for _ in range(self.experts)] for _ in range(self.layers)]
        self.code = np.array(chosen, np.uint8)
        self.owned = {p: self.code == PRECISION_CODES[p] for p in precisions}
        # All experts have FP4 rows besides, and steps use them instead, or for some tokens.
        self.recovers = len(precisions) > 1 and rng.random() < 0.7
        if self.recovers:
            self.owned[FP4] = np.ones_like(self.owned[FP4])
        self.top = rng.randint(2, min(self.experts, 24))
        self.options = TierOptions(
            policy=rng.choice(sorted(POLICIES)),
            half_life=rng.choice((8, 100)),
            margin=rng.choice((0, 0.25)),
            plan_every=rng.randint(1, 3),
            max_moves=rng.randint(1, 6),
            streaming=rng.choice((None, 0, 2)),
            io_threads=rng.randint(1, 3),
            layer_rows=self.top,
        )
        self.device = CudaTierDevice(
            self.code,
            {p: ROW_BYTES[p] for p in precisions},
            TOP_K,
            steps.torch_device,  # type: ignore[attr-defined]
            decode_tokens=DECODE_TOKENS,
            stage_row_bytes=max(ROW_BYTES[p] for p in precisions),
            stage_rows=rng.choice((0, 3, self.experts)),
        )
        self.steps = steps(self.device, self.source, self.code)
        on_device = self.steps.torch_device
        self.foresees = rng.random() < 0.5
        if self.foresees:
            self.permutation = torch.randperm(
                self.experts, generator=torch.Generator().manual_seed(seed), dtype=torch.int32
            ).to(on_device)
            tables = dict(enumerate(self._tables()))
            self.device.foresee(tables)
        self.own = torch.from_numpy(self.code.copy()).to(on_device)
        self.fp4 = torch.full_like(self.own, PRECISION_CODES[FP4])
        self.manager = self._manager()
        self.used: Counter[Phase] = Counter()
        self.decoded = 0
        self.faults = False
        self.failed: set[int] = set()
        self.unreadable: set[int] = set()

    def run(self) -> None:
        rng, manager = self.rng, self.manager
        with manager:
            manager.start()
            if rng.random() < 0.5:
                manager.preload()
            static = torch.full(
                (self.layers, DECODE_TOKENS, TOP_K), -1, dtype=torch.int32,
                device=self.steps.torch_device,
            )  # fmt: skip
            tokens = self._tokens(static[0])
            with manager.quiet():
                replay = self.steps.captured(lambda: self._launch(tokens, list(static)))
            resizes: list[Future[None]] = []
            for _ in range(rng.randint(5, 20)):
                if rng.random() < 0.6:
                    ids = torch.stack(self._routing(Phase.DECODE))
                    self.steps.write(static, ids)
                    self.steps.write(tokens, self._tokens(ids[0]))
                    self.used[Phase.DECODE] += sum(self._different(of) for of in ids)
                    replay()
                    self.decoded += 1
                else:
                    self._pass(Phase.SCAN)
                if self.recovers:
                    self._recover()
                if rng.random() < 0.5:  # otherwise steps queue up
                    self.steps.synchronize()
                    self._note_failure()
                self._event(resizes)
            self.source.broken = set()
            self._rest(resizes)

    def _launch(self, tokens: torch.Tensor, ids: list[torch.Tensor]) -> None:
        self.device.ahead(tokens)
        for layer, chosen in enumerate(ids):
            rows = self.device.ensure(layer, chosen)
            self.steps.check(layer, rows, chosen, self.device.code)
        self.device.finish()

    def _pass(self, phase: Phase, **options: Any) -> None:
        ids = self._routing(phase)
        self.used[phase] += sum(map(self._different, ids))
        self.device.ahead(self._tokens(ids[0]), options.get("code"))
        for layer, chosen in enumerate(ids):
            rows = self.device.ensure(layer, chosen, **options)
            code = options.get("code")
            self.steps.check(layer, rows, chosen, self.device.code if code is None else code)
        self.device.finish()

    def _recover(self) -> None:
        choice, device = self.rng.random(), self.device
        if choice < 0.3:  # a second pass of the step
            self._pass(self.rng.choice(list(Phase)), code=self.fp4, repeats=True)
        elif choice < 0.5:
            for layer in range(self.layers):
                self._in_two_parts(layer)
            device.finish()
            self.decoded += 1
        elif choice < 0.7:
            self.steps.write(device.code, self.rng.choice((self.own, self.fp4)))

    def _in_two_parts(self, layer: int) -> None:
        ids = self._ids(Phase.DECODE)
        some = torch.tensor([self.rng.random() < 0.5 for _ in ids], device=ids.device)
        for part, code in enumerate((self.own, self.fp4)):
            own = ids.masked_fill((some == bool(part))[:, None], -1)
            self.used[Phase.DECODE] += self._different(own)
            rows = self.device.ensure(layer, own, code=code, part=part)
            self.steps.check(layer, rows, own, code)

    def _different(self, ids: torch.Tensor) -> int:
        return sum(0 <= e < self.experts for e in ids.unique().tolist())

    def _routing(self, phase: Phase) -> list[torch.Tensor]:
        """By layer. What was foreseen of the second is right now and then."""
        ids = [self._ids(phase) for _ in range(self.layers)]
        if self.foresees and self.rng.random() < 0.6:
            experts = (ids[0] >= 0) & (ids[0] < self.experts)
            chosen = self.permutation[ids[0].clamp(0, self.experts - 1).long()]
            ids[1] = torch.where(experts, chosen, ids[0])
        return ids

    def _tables(self) -> list[torch.Tensor]:
        """Of the first two layers: token a · experts + b is for experts a and b."""
        each = torch.arange(self.experts, dtype=torch.int32, device=self.steps.torch_device)
        first = torch.cartesian_prod(each, each).contiguous()
        return [first, self.permutation[first.long()].contiguous()]

    def _tokens(self, ids: torch.Tensor) -> torch.Tensor:
        """The tokens that use these experts; −1 where one of them is none."""
        a, b = ids[:, 0], ids[:, 1]
        known = ((ids >= 0) & (ids < self.experts)).all(1)
        return torch.where(known, a * self.experts + b, -1)

    def _ids(self, phase: Phase) -> torch.Tensor:
        """Experts of low number more often; some ids are no experts."""
        rng = self.rng
        tokens = DECODE_TOKENS if phase == Phase.DECODE else rng.randint(DECODE_TOKENS + 1, 600)
        count = rng.randint(0, min(self.top, tokens * TOP_K))
        pool = list({int(self.experts * rng.random() ** 2) for _ in range(count)})
        ids = [*pool, *rng.choices([*pool, -1, self.experts], k=tokens * TOP_K - len(pool))]
        rng.shuffle(ids)
        made = torch.tensor(ids, dtype=torch.int32).view(tokens, TOP_K)
        return made.to(self.steps.torch_device)

    def _sizes(self) -> TierSizes:
        rng, rows = self.rng, self.layers * min(self.experts, 30)
        if rng.random() < 0.3:
            places = rng.randint(2, self.top + 2)
            return TierSizes(self.top + 2 - places, places)
        return TierSizes(rng.randint(0, rows), rng.randint(2, rows + 4))

    def _manager(self) -> TieredResidency:
        """Draws sizes until they are accepted: some are refused."""
        while True:
            sizes = {p: self._sizes() for p in self.owned}
            try:
                for p, owned in self.owned.items():
                    check_sizes(p, owned, sizes[p], ROW_BYTES[p], self.options)
            except ConfigError as error:
                if "Make the arena at least" not in error.hint:
                    raise
                continue
            return TieredResidency(
                self.source, self.source.layers, self.owned, sizes, self.device, self.options
            )

    def _event(self, resizes: list[Future[None]]) -> None:
        rng, choice = self.rng, self.rng.random()
        if choice < 0.1:
            resizes.append(self.manager.resize(rng.choice(list(self.owned)), self._sizes()))
        elif choice < 0.2:
            self.steps.synchronize()
            self._note_failure()
            with self.manager.quiet():
                pass
        elif choice < 0.3:
            self.faults = True
            self.source.broken = {
                RowKey(FIRST_LAYER + layer, e, p)
                for layer in range(self.layers)
                for e in range(self.experts)
                for p in self.owned
                if rng.random() < 0.2
            }
        elif choice < 0.5:
            self.source.broken = set()
        elif choice < 0.6:
            precision = rng.choice(list(self.owned))
            rows = np.flatnonzero(self.owned[precision]).tolist()
            chosen = rng.sample(rows, rng.randint(0, min(8, len(rows))))
            self.manager.fetch(precision, chosen, self.unreadable)

    def _note_failure(self) -> None:
        if step := self.device.failed_step():
            self.failed.add(step)
            assert isinstance(self.manager.failure(step), PackError)

    def _rest(self, resizes: list[Future[None]]) -> None:
        """Lets everything come to rest, and looks at it."""
        steps, device, manager = self.steps, self.device, self.manager
        steps.synchronize()
        self._note_failure()
        assert steps.wrong == 0, f"{steps.wrong} rows were wrong"
        assert self.faults or (device.failed_steps() == 0 and not self.unreadable)
        assert device.failed_steps() >= len(self.failed)
        assert (steps.zeros > 0) == (device.failed_steps() > 0)
        for future in resizes:
            error = future.exception(30)
            assert isinstance(error, ConfigError | ResidencyError | None), repr(error)
        device.trim()
        assert device.begun() == device.done()
        now = manager.metrics()
        for phase in Phase:
            found = sum(count for (_, p, _), count in now.hits.items() if p == phase)
            assert found == self.used[phase]
        assert now.steps == self.decoded
        used = device.counts().use
        assert sum(int(use.sum()) for use in used.values()) == self.used[Phase.DECODE]
        assert all(not use[~self.owned[p]].any() for p, use in used.items())
        with manager.quiet():
            self._check_table()

    def _check_table(self) -> None:
        for precision, kind in self.manager._kinds.items():
            rows = kind.rows
            rows.check()
            for row in range(self.layers * self.experts):
                place = None
                if rows.tier[row] != Tier.DISK:
                    place = Place(precision, Tier(int(rows.tier[row])), int(rows.index[row]))
                index = self.device._mailbox.entry(precision, *divmod(row, self.experts))
                assert int(self.device._mailbox.table[index]) == self.device._value(place)


def run_block(seeds: range, steps: Callable[..., Any]) -> None:
    for seed in seeds:
        try:
            History(seed, steps).run()
        except BaseException as error:
            error.add_note(f"history {seed}")
            raise
