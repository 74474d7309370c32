"""A trace on disk, and what its replay predicts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from moet.errors import ConfigError
from moet.residency.metrics import Phase
from moet.residency.policy import POLICIES
from moet.residency.tiers import Tier, TierOptions, TierSizes
from moet.residency.tiers.simulate import simulate
from moet.residency.tiers.trace import RoutingTrace

LAYERS, EXPERTS, TOP = 3, 32, 4
ROWS = LAYERS * EXPERTS


def skewed(steps: int, seed: int = 0, shift_at: int | None = None) -> RoutingTrace:
    """Decode steps whose experts follow a power law; from `shift_at` on another one."""
    rng = np.random.default_rng(seed)
    weights = np.arange(1, EXPERTS + 1) ** -1.5
    order = np.array([rng.permutation(EXPERTS) for _ in range(LAYERS)])
    made = []
    for number in range(steps):
        if number == shift_at:
            order = order[:, ::-1]
        made.append(
            (
                Phase.DECODE,
                [
                    (
                        layer,
                        order[layer][
                            rng.choice(EXPERTS, TOP, replace=False, p=weights / weights.sum())
                        ].tolist(),
                    )
                    for layer in range(LAYERS)
                ],
            )
        )
    return RoutingTrace.from_steps(range(LAYERS), EXPERTS, 4096, made)


def best_share(trace: RoutingTrace, slots: int, first: int) -> float:
    """What the best unchanging choice of rows would find, from step `first` on."""
    use = np.sort((trace.use(trace.steps) - trace.use(first)).reshape(-1))[::-1]
    return float(use[:slots].sum() / use.sum())


def test_a_trace_survives_the_file(tmp_path: Path) -> None:
    steps = [
        (Phase.DECODE, [(0, [1, 3]), (2, [0])]),
        (Phase.SCAN, [(1, [0, 1, 2, 3])]),
        (Phase.DECODE, []),
        (Phase.DECODE, [(1, [2])]),
    ]
    trace = RoutingTrace.from_steps((4, 5, 9), 4, 8192, steps)
    trace.save(tmp_path / "trace.safetensors")
    loaded = RoutingTrace.load(tmp_path / "trace.safetensors")
    assert list(loaded.replay()) == steps
    assert list(loaded.replay(1)) == steps[1:]
    assert (loaded.layers, loaded.num_experts, loaded.row_bytes) == ((4, 5, 9), 4, 8192)
    assert (loaded.steps, loaded.layer_rows) == (4, 4)
    assert loaded.use(4).tolist() == [[0, 1, 0, 1], [0, 0, 1, 0], [1, 0, 0, 0]]
    assert loaded.use(1).sum() == 3


def test_what_is_no_trace_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.safetensors"
    with pytest.raises(ConfigError, match=r"trace\.safetensors: there is no such file"):
        RoutingTrace.load(path)
    path.write_bytes(b"not a trace")
    with pytest.raises(ConfigError, match="cannot be read as a routing trace"):
        RoutingTrace.load(path)
    save_file({"x": np.zeros(1)}, path)
    with pytest.raises(ConfigError, match="is no routing trace of version 1"):
        RoutingTrace.load(path)


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("expert", lambda a: a + EXPERTS, "a number is not between 0 and 31"),
        ("layer", lambda a: a - 1, "a number is not between 0 and 2"),
        ("step", lambda a: a[::-1].copy(), "out of order or twice"),
        ("expert", lambda a: a * 0, "out of order or twice"),
        ("step", lambda a: a[:-1], "not int32 of one length"),
        ("prefill", lambda a: a.astype(np.int32), "not flags"),
    ],
)
def test_a_damaged_trace_is_refused(tmp_path: Path, name: str, change, problem: str) -> None:
    path = tmp_path / "trace.safetensors"
    trace = skewed(5)
    trace.save(path)
    tensors = load_file(path)
    tensors[name] = change(tensors[name])
    metadata = {"moet_trace": "1", "layers": "0,1,2", "num_experts": "32", "row_bytes": "4096"}
    save_file(tensors, path, metadata)
    with pytest.raises(ConfigError, match=problem):
        RoutingTrace.load(path)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_everything_fits(policy: str) -> None:
    found = simulate(skewed(30), TierSizes(ROWS, 2), TierOptions(policy=policy))
    assert found.share(Tier.GPU) == 1
    assert found.steps == found.steps_local == 30
    assert found.evictions == found.demotions == 0


def test_nothing_in_gpu_memory() -> None:
    found = simulate(skewed(30), TierSizes(0, ROWS), TierOptions())
    assert found.share(Tier.GPU) == 0
    assert found.steps_local == found.promotions == 0


def test_the_same_trace_gives_the_same_prediction() -> None:
    trace, sizes = skewed(60), TierSizes(20, 30)
    assert simulate(trace, sizes, TierOptions()) == simulate(trace, sizes, TierOptions())


def test_rows_are_counted_once_each() -> None:
    trace = skewed(50)
    found = simulate(trace, TierSizes(10, 20), TierOptions(), warmup=10)
    assert sum(found.rows.values()) == 40 * LAYERS * TOP
    assert found.steps == 40


def test_lfu_comes_near_the_best_choice_from_a_cold_start() -> None:
    trace = skewed(400)
    options = TierOptions(plan_every=4, half_life=200)
    found = simulate(trace, TierSizes(19, 24), options)
    assert found.share(Tier.GPU) > 0.9 * best_share(trace, 19, 0)
    in_memory = found.share(Tier.GPU) + found.share(Tier.ARENA)
    assert in_memory > 0.9 * best_share(trace, 43, 0)
    assert found.demotions > 0


def test_hot_rows_change_places_when_the_traffic_does() -> None:
    """Also where every disk row that passes through wants a place in a full arena."""
    trace = skewed(400, shift_at=200)
    options = TierOptions(plan_every=4, half_life=30)
    adapts = simulate(trace, TierSizes(19, 24), options, warmup=200)
    stays = simulate(
        trace, TierSizes(19, 24), TierOptions(policy="static", plan_every=4), warmup=200
    )
    assert adapts.share(Tier.GPU) > 2 * stays.share(Tier.GPU)
    assert adapts.promotions > 19


def test_more_memory_finds_more() -> None:
    trace = skewed(150)
    shares = [
        simulate(trace, TierSizes(slots, ROWS), TierOptions(), warmup=50).share(Tier.GPU)
        for slots in (5, 10, 20, 40, 96)
    ]
    assert shares == sorted(shares)
    assert shares[-1] == 1


@pytest.mark.parametrize("policy", ["lfu", "lru"])
def test_a_prompt_evicts_nothing_that_decode_keeps(policy: str) -> None:
    """Decode finds the same rows as without the prompt in between."""
    hot = [(layer, list(range(TOP))) for layer in range(LAYERS)]
    scan = [(layer, list(range(EXPERTS))) for layer in range(LAYERS)]
    steps = [(Phase.DECODE, hot)] * 30 + [(Phase.SCAN, scan)] * 5 + [(Phase.DECODE, hot)] * 30
    trace = RoutingTrace.from_steps(range(LAYERS), EXPERTS, 4096, steps)
    options = TierOptions(policy=policy, plan_every=4)
    found = simulate(trace, TierSizes(LAYERS * TOP, 50), options, warmup=20)
    assert found.steps == 40
    assert found.steps_local == 40
    assert found.rows[Phase.SCAN, Tier.DISK] > 0


def test_sizes_that_cannot_work_and_a_short_trace() -> None:
    with pytest.raises(ConfigError, match="Make the arena at least 4 rows"):
        simulate(skewed(5), TierSizes(2, 3), TierOptions())
    with pytest.raises(ConfigError, match="5 warm-up steps leave nothing of 5"):
        simulate(skewed(5), TierSizes(10, 10), TierOptions(), warmup=5)
