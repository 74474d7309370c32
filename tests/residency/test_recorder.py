"""A recorded trace is what the manager was asked for, and no more than was agreed on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from random import Random

import numpy as np
import pytest

from moet.residency.manager import ResidencyManager
from moet.residency.metrics import Phase
from moet.residency.recorder import TraceRecorder
from moet.residency.tiers.trace import RoutingTrace

from .sim import BASE, SimSource, run_lease, uniform

Step = list[tuple[set[int], set[int]]]  # decode's and scan's experts of each layer


def steps(source: SimSource, count: int, mixed: bool = False) -> list[Step]:
    """Random steps that decode, with a prompt now and then: in between, or in the same step."""
    rng = Random(0)

    def some(wanted: bool, number: int) -> set[int]:
        return set(rng.sample(range(source.num_experts), number)) if wanted else set()

    return [
        [(some(mixed or bool(n % 5), 3), some(n % 5 == 0, 5)) for _ in source.layers]
        for n in range(count)
    ]


def serve(manager: ResidencyManager, source: SimSource, made: list[Step]) -> None:
    for step in made:
        for layer, (decode, scan) in zip(source.layers, step, strict=True):
            run_lease(manager, layer, decode=decode, scan=scan)


@pytest.mark.parametrize("policy", ["lru", "lfu", "static"])
def test_asked_again_by_the_trace_the_manager_decides_the_same(tmp_path: Path, policy: str) -> None:
    source, path = SimSource(), tmp_path / "trace.safetensors"

    def manager(trace_path: Path | None) -> ResidencyManager:
        return ResidencyManager(
            source, uniform(source), {BASE: 12}, streaming=2, policy=policy, trace_path=trace_path
        )

    with manager(path) as live:
        serve(live, source, steps(source, 60))
    trace = RoutingTrace.load(path)
    assert (trace.layers, trace.num_experts, trace.row_bytes) == (source.layers, 8, 4096)
    none: set[int] = set()
    again = [
        [(none, set(e)) if phase == Phase.SCAN else (set(e), none) for _, e in routing]
        for phase, routing in trace.replay()
    ]
    with manager(None) as replayed:
        serve(replayed, source, again)
    assert replayed.metrics().hits == live.metrics().hits
    assert replayed.metrics().misses == live.metrics().misses
    assert replayed.metrics().evictions == live.metrics().evictions
    assert trace.steps == live.metrics().steps == 60


def test_a_step_that_does_both_becomes_two(tmp_path: Path) -> None:
    source, path = SimSource(), tmp_path / "trace.safetensors"
    made = steps(source, 12, mixed=True)
    with ResidencyManager(source, uniform(source), {BASE: 24}, trace_path=path) as manager:
        serve(manager, source, made)
    expected = []
    for step in made:
        expected.append((Phase.DECODE, [(i, sorted(d)) for i, (d, _) in enumerate(step)]))
        scan = [(i, sorted(s - d)) for i, (d, s) in enumerate(step) if s - d]
        if scan:
            expected.append((Phase.SCAN, scan))
    assert list(RoutingTrace.load(path).replay()) == expected
    counts = manager.metrics()
    total = sum(counts.hits.values()) + sum(counts.misses.values())
    assert total == sum(len(ids) for _, routing in expected for _, ids in routing)


def test_a_layer_that_runs_twice_in_a_step_is_there_once(tmp_path: Path) -> None:
    """As draft layers do."""
    source, path = SimSource(), tmp_path / "trace.safetensors"
    with ResidencyManager(source, uniform(source), {BASE: 24}, trace_path=path) as manager:
        run_lease(manager, 1, decode=[1, 2])
        run_lease(manager, 5, decode=[0, 3])
        run_lease(manager, 5, decode=[3, 4], scan=[0, 7])
    assert list(RoutingTrace.load(path).replay()) == [
        (Phase.DECODE, [(0, [1, 2]), (2, [0, 3, 4])]),
        (Phase.SCAN, [(2, [7])]),
    ]


class Background:
    """Runs jobs when it is told to."""

    def __init__(self) -> None:
        self.jobs: list[tuple[Callable[[], None], Future[None]]] = []

    def __call__(self, job: Callable[[], None]) -> Future[None]:
        future: Future[None] = Future()
        self.jobs.append((job, future))
        return future

    def run(self) -> None:
        for job, future in self.jobs:
            job()
            future.set_result(None)
        self.jobs = []


def recorder(path: Path, run: Background, **options: int) -> TraceRecorder:
    return TraceRecorder(path, (1, 2), 8, 4096, run, **options)


def step(recording: TraceRecorder, *experts: int) -> None:
    recording.use(0, np.array(experts, np.int64), np.zeros(0, np.int64))
    recording.end_step()


def test_it_is_written_now_and_then_and_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TraceRecorder, "SAVE_EVERY", 10)
    path, run = tmp_path / "trace.safetensors", Background()
    recording = recorder(path, run)
    for number in range(25):
        step(recording, number % 8)
    assert len(run.jobs) == 1  # not a second one while the first waits
    run.run()
    assert RoutingTrace.load(path).steps == 10
    step(recording, 1)
    run.run()
    assert RoutingTrace.load(path).steps == 26
    step(recording, 2)
    recording.close()
    assert RoutingTrace.load(path).expert.tolist() == [*(n % 8 for n in range(25)), 1, 2]
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_it_ends_at_its_bound_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "trace.safetensors"
    recording = recorder(path, Background(), most_lines=7)
    for _ in range(5):
        step(recording, 1, 2, 3)
    recording.close()
    assert RoutingTrace.load(path).steps == 2
    assert caplog.text.count("recording ends after 2 steps, at 6 rows used") == 1


def test_nothing_used_writes_nothing(tmp_path: Path) -> None:
    recording = recorder(tmp_path / "trace.safetensors", Background())
    step(recording)
    recording.close()
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recording = recorder(tmp_path / "none" / "trace.safetensors", Background())
    step(recording, 1)
    recording.close()
    assert "trace.safetensors cannot be written" in caplog.text
