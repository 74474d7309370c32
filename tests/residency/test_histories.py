"""Any pool sizes, policy, sequence of leases, timing and failures: every promise holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import Executor, Future
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moet.errors import PackError
from moet.formats.layout import Precision
from moet.pack.source import RowKey
from moet.residency.lease import Wave
from moet.residency.manager import ResidencyManager
from moet.residency.metrics import Phase
from moet.residency.policy import POLICIES

from .sim import (
    BASE,
    FP4,
    ROW_BYTES,
    SimSource,
    check_pools,
    coming_rows,
    random_device,
    resident_rows,
    run_lease,
)


class KernelError(Exception):
    """A kernel that fails."""


class History:
    """A random manager and its random leases, against a model of what must be counted."""

    def __init__(self, rng: Random, slow: bool) -> None:
        self.rng = rng
        self.source = SimSource(
            layers=sorted(rng.sample(range(6), rng.randint(1, 3))),
            num_experts=rng.randint(1, 12),
        )
        if slow:  # the reads' own generator: they draw in threads, in any order
            pace = Random(rng.randint(0, 2**32))
            self.source.delay = lambda: pace.choice((0, 0, 0.0002, 0.001))
        share = rng.choice((0.0, 0.3, 1.0))
        self.precision = {
            layer: [FP4 if rng.random() < share else BASE for _ in range(self.source.num_experts)]
            for layer in self.source.layers
        }
        streaming = rng.randint(1, 4)
        rows = Counter(p for row in self.precision.values() for p in row)
        slots = {p: rng.randint(min(n, streaming + 1), n) for p, n in rows.items()}
        self.manager = ResidencyManager(
            self.source,
            self.precision,
            slots,
            streaming=streaming,
            backend=random_device(rng.randint(0, 2**32)),
            policy=rng.choice(sorted(POLICIES)),
            half_life=rng.choice((1, 8, 1000)),
            io_threads=rng.randint(1, 4),
        )
        self.asked: Counter[tuple[Precision, Phase]] = Counter()
        self.steps = self.waves = 0
        self.foresees = rng.random() < 0.5
        self.foreseen: set[RowKey] = set()

    def run(self, leases: int) -> None:
        layers = self.source.layers
        for number in range(leases):
            layer = layers[number % len(layers)]
            if self.rng.random() < 0.1:  # a draft layer again, or one without tokens
                layer = self.rng.choice(layers)
            self.lease(layer)
            check_pools(self.manager)
        self.manager.prefetch({})
        self.check_counts()
        self.manager.close()
        assert self.manager.metrics().steps == self.steps

    def lease(self, layer: int) -> None:
        rng, experts = self.rng, range(self.source.num_experts)
        decode = rng.sample(experts, rng.randint(0, min(4, len(experts))))
        scan = rng.sample(experts, rng.choice((0, 0, len(experts) // 2, len(experts))))
        asked = dict.fromkeys(scan, Phase.SCAN) | dict.fromkeys(decode, Phase.DECODE)
        self.asked.update((self.precision[layer][e], phase) for e, phase in asked.items())
        self.steps += layer == self.source.layers[0]
        keys = {RowKey(layer, e, self.precision[layer][e]) for e in asked}
        missing = keys - resident_rows(self.manager)
        if rng.random() < 0.2:
            self.source.broken = {key for key in keys if rng.random() < 0.5}
        coming = coming_rows(self.manager)  # waits, so that their reads are not counted below
        before = len(self.source.reads)
        if self.foresees and rng.random() < 0.7:
            self.foresee(layer, list(asked))
            missing &= keys - resident_rows(self.manager)
        else:
            missing -= coming
        fails = missing & self.source.broken
        stop = rng.choice((None, None, None, 0, 1))
        seen: list[Wave] = []

        def during(wave: Wave) -> None:
            self.waves += 1
            if len(seen) == stop:
                raise KernelError
            seen.append(wave)

        error: Exception | None = None
        try:
            run_lease(self.manager, layer, decode, scan, during)
        except (KernelError, PackError) as caught:
            error = caught
        read = self.source.reads[before:]
        if error is None:
            assert not fails, "a row that cannot be read was handed out"
            assert len(read) == len(set(read)), "a row was read twice"
            assert missing <= set(read) <= keys | self.foreseen
        elif isinstance(error, PackError):
            assert any(error is raised for raised in self.source.raised), "another error"
        self.source.broken = set()

    def foresee(self, layer: int, experts: list[int]) -> None:
        """Asks for rows of this lease and of others, which may never need them."""
        rng, everyone = self.rng, range(self.source.num_experts)
        chosen = {
            of: rng.sample(everyone, rng.randint(0, len(everyone))) for of in self.source.layers
        }
        chosen[layer] = [e for e in experts if rng.random() < 0.9]
        chosen = {of: chosen[of] for of in chosen if rng.random() < 0.8}
        self.foreseen = {RowKey(of, e, self.precision[of][e]) for of in chosen for e in chosen[of]}
        self.manager.prefetch(chosen)
        check_pools(self.manager)

    def check_counts(self) -> None:
        now, source = self.manager.metrics(), self.source
        assert Counter(now.hits) + Counter(now.misses) == self.asked
        assert now.memory_bytes == sum(count * ROW_BYTES[p] for (p, _), count in now.hits.items())
        arrived = len(source.reads) - now.read_errors
        assert sum(now.disk_latency.counts) == arrived
        assert sum(pool.used for pool in now.pools.values()) == arrived - now.evictions
        assert now.waves == self.waves
        assert now.steps == max(0, self.steps - 1)


@pytest.mark.timeout(120)
@given(st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_history_with_random_delays(rng: Random) -> None:
    History(rng, slow=True).run(leases=20)


def run_block(seeds: range) -> None:
    for seed in seeds:
        try:
            History(Random(seed), slow=False).run(leases=6)
        except BaseException as error:
            error.add_note(f"history {seed}")
            raise


@pytest.mark.timeout(300)
def test_a_thousand_histories_with_threads() -> None:
    run_block(range(1000))


class AtOnce(Executor):
    """Reads in the caller's thread: no timing, but many more histories of the bookkeeping."""

    def __init__(self, threads: int, thread_name_prefix: str) -> None: ...

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(work(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


@pytest.mark.timeout(300)
@pytest.mark.parametrize("block", range(9))
def test_nine_thousand_histories_without_threads(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moet.residency.reader.ThreadPoolExecutor", AtOnce)
    run_block(range(1000 * (block + 1), 1000 * (block + 2)))
