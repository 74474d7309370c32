"""Sizes of CPU pools and of a GPU's tiers: whatever is asked, what comes out works and fits."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moet.errors import ConfigError
from moet.formats.layout import Precision, RowLayout
from moet.host_memory import HostMemory
from moet.plan.reserve import kv_room
from moet.residency.tiers.options import check_sizes
from moet.settings import Settings
from moet.vllm import pools
from moet.vllm.pools import all_rows, kv_bytes, rank_file, reserve_for, size_pools
from moet.vllm.tiers import owned_rows, size_tiers

GIB = 1 << 30
BASE, FP4 = Precision.BASE, Precision.NVFP4
LAYERS, EXPERTS = 10, 64
LAYOUTS = {p: RowLayout(p, 4096, 2048, 1) for p in (BASE, FP4)}
ROW = LAYOUTS[BASE].row_bytes  # 6.8 MiB
TEXT = {
    "num_hidden_layers": LAYERS,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}


def config(**options: Any) -> Any:
    """The part of a VllmConfig that sizes follow from."""
    known = {
        "context": 8192, "streams": 4, "chunk": 2048, "eager": False, "utilization": 0.9,
        "kv": None, "ranks": 1, "stages": 1,
    }  # fmt: skip
    of = SimpleNamespace(**(known | options))
    return SimpleNamespace(
        model_config=SimpleNamespace(
            hf_text_config=SimpleNamespace(to_dict=lambda: TEXT),
            max_model_len=of.context,
            enforce_eager=of.eager,
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=of.streams, max_num_batched_tokens=of.chunk),
        cache_config=SimpleNamespace(
            cache_dtype="auto",
            kv_cache_memory_bytes=of.kv,
            gpu_memory_utilization=of.utilization,
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=of.ranks,
            pipeline_parallel_size=of.stages,
            local_world_size=of.ranks,
        ),
        speculative_config=None,
    )


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the host's memory: host(total, available), in GiB."""

    def set_memory(total: float, available: float) -> None:
        memory = HostMemory(int(total * GIB), int(available * GIB))
        monkeypatch.setattr(pools, "host_memory", lambda: memory)

    monkeypatch.setattr(pools.psutil.Process, "memory_info", lambda _: SimpleNamespace(rss=2 * GIB))
    return set_memory


def masks(fp4: float = 0.0, both: bool = False) -> dict[Precision, Any]:
    """All rows base, the last part FP4, or both of all."""
    high = np.zeros((LAYERS, EXPERTS), np.bool_)
    high[:, round(EXPERTS * (1 - fp4)) :] = True
    return {BASE: ~high if not both else ~high | high, FP4: high if not both else high | ~high}


def tiers(
    values: dict[str, Any], owned: Any = None, free: float = 40, total: float = 48, **options: Any
) -> Any:
    layer_rows = options.pop("layer_rows", None)
    return size_tiers(
        Settings.parse(values),
        masks() if owned is None else owned,
        LAYOUTS,
        config(**options),
        gpu_free=int(free * GIB),
        gpu_total=int(total * GIB),
        layer_rows=layer_rows,
    )


def test_all_fit_and_the_arena_is_only_a_way_in(host: Any) -> None:
    host(64, 50)
    plan = tiers({})
    assert plan.sizes[BASE].slots == LAYERS * EXPERTS
    assert plan.staging == 0
    assert 2 <= plan.sizes[BASE].places < 32
    text = "\n".join(plan.lines)
    assert "GPU memory" in text
    assert "640 of 640 rows (base_pool auto)" in text
    assert "room for 4 requests of 8,192 tokens" in text
    assert "on disk only" not in text


def test_what_does_not_fit_goes_down_the_tiers(host: Any) -> None:
    host(16, 12)
    plan = tiers({}, free=4, total=4)
    sizes = plan.sizes[BASE]
    assert 0 < sizes.slots < LAYERS * EXPERTS
    assert plan.staging > 0
    assert sizes.slots + sizes.places >= LAYERS * EXPERTS + 1
    host(11, 8.2)
    poor = tiers({}, free=4, total=4)
    assert poor.sizes[BASE].places < sizes.places
    assert "on disk only" in "\n".join(poor.lines)


def test_vllm_keeps_room_for_the_kv_cache(host: Any) -> None:
    """By vLLM's own account: what is in use after the trial step, within the utilization."""
    host(64, 50)
    for options in ({}, {"kv": 3 * GIB}, {"streams": 64, "context": 32768}, {"eager": True}):
        plan = tiers({}, free=7, total=8, **options)
        of = config(**options)
        reserve = reserve_for(of, gpu=True)
        activations = reserve.workspace["activations"]
        in_use = GIB + plan.sizes[BASE].slots * ROW + plan.staging + activations
        left = int(0.9 * 8 * GIB) - in_use
        assert left >= (
            3 * GIB
            if options.get("kv")
            else reserve.kv_cache.nbytes(of.model_config.max_model_len, 1)
        )


def test_staging_is_as_it_is_set(host: Any) -> None:
    host(64, 50)
    assert tiers({"prefill_staging": True}).staging == 2 * EXPERTS * ROW
    assert tiers({"prefill_staging": False}, free=4, total=4).staging == 0
    assert tiers({"base_pool": "19%"}).staging == 2 * EXPERTS * ROW
    assert tiers({"base_pool": "19%", "prefill_staging": False}).staging == 0


def test_sizes_as_asked(host: Any) -> None:
    host(64, 50)
    sizes = tiers({"base_pool": "19%", "arena": "25%"}).sizes[BASE]
    assert (sizes.slots, sizes.places) == (122, 160)
    sizes = tiers({"base_pool": "100", "arena": "1GiB"}).sizes[BASE]
    assert (sizes.slots, sizes.places) == (100, GIB // ROW)
    # More than is ever of use is not pinned.
    assert tiers({"base_pool": "50%", "arena": "100%"}).sizes[BASE].places == 320 + 17
    assert tiers({"base_pool": "50%", "arena": "40GiB"}).sizes[BASE].places == 320 + 17


def test_a_step_of_few_tokens_needs_a_small_arena(host: Any) -> None:
    host(64, 50)
    values = {"base_pool": "0", "arena": "20"}
    with pytest.raises(ConfigError, match="arena 20: an arena of 20 base rows is too small"):
        tiers(values)
    assert tiers(values, layer_rows=16).sizes[BASE].places == 20


def test_base_rows_come_first_where_experts_have_both(host: Any) -> None:
    host(64, 50)
    shared = tiers({}, masks(0.5), free=6, total=6).sizes
    assert shared[BASE].slots < 320
    assert shared[BASE].slots == pytest.approx(shared[FP4].slots, abs=2)
    both = tiers({}, masks(both=True), free=10, total=10).sizes
    assert both[BASE].slots == 640
    assert 0 < both[FP4].slots < 640
    with_least = tiers({}, masks(both=True), free=3, total=3).sizes
    assert with_least[FP4].places >= EXPERTS + 2


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"base_pool": "100%", "fp4_pool": "100%"}, "of GPU memory for experts are more than"),
        ({"base_pool": "0", "fp4_pool": "0", "arena": "100%"}, "arena 100%: 13.0 GiB of host"),
        ({"prefill_staging": True, "base_pool": "75%"}, "of GPU memory for experts are more than"),
    ],
)
def test_what_cannot_be_is_refused(host: Any, values: dict[str, Any], message: str) -> None:
    host(12, 9)
    with pytest.raises(ConfigError, match=message):
        tiers(values, masks(both=True), free=5, total=5)


def test_too_little_host_memory_says_how_much_it_takes(host: Any) -> None:
    host(9.2, 8)
    with pytest.raises(ConfigError, match=r"arena auto: an arena of \d+ base rows is too small"):
        tiers({"base_pool": "0"}, free=4, total=4)


def test_pipeline_stages_and_ranks_share(host: Any) -> None:
    host(64, 50)
    of = config(stages=2, streams=1)
    whole = kv_bytes(config(streams=1), reserve_for(of, gpu=True), 40 * GIB)[0]
    assert kv_bytes(of, reserve_for(of, gpu=True), 40 * GIB)[0] == -(-whole // 2)
    host(40, 38)
    one, two = (
        tiers({"base_pool": "0"}, masks(both=True), ranks=ranks).sizes[FP4] for ranks in (1, 4)
    )
    assert two.places < one.places


def test_kv_room_is_a_quarter_and_at_least_one_request() -> None:
    cache = reserve_for(config(), gpu=True).kv_cache
    nbytes, requests = kv_room(cache, 8192, 100, 16 * GIB)
    assert nbytes <= 4 * GIB < nbytes * (requests + 1) / requests
    assert kv_room(cache, 8192, 3, 100 * GIB)[1] == 3
    assert kv_room(cache, 8192, 3, 0)[1] == kv_room(cache, 8192, 3, -GIB)[1] == 1


SIZE = st.one_of(
    st.just("auto"),
    st.integers(0, 100).map(lambda n: f"{n}%"),
    st.integers(0, 700).map(str),
    st.integers(0, 9000).map(lambda n: f"{n}MiB"),
)


@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    values=st.fixed_dictionaries(
        {"base_pool": SIZE, "fp4_pool": SIZE, "arena": SIZE},
        optional={
            "prefill_staging": st.sampled_from([True, False]),
            "streaming_slots": st.integers(1, 64),
        },
    ),
    owned=st.sampled_from([masks(), masks(0.3), masks(1.0), masks(both=True)]),
    free=st.floats(0.1, 30),
    more=st.floats(0, 10),
    memory=st.tuples(st.floats(4, 64), st.floats(0.01, 1)),
    options=st.fixed_dictionaries(
        {},
        optional={
            "kv": st.integers(1, 8 * GIB),
            "streams": st.integers(1, 256),
            "context": st.integers(1, 100_000),
            "ranks": st.sampled_from([1, 2, 8]),
            "layer_rows": st.integers(1, 100),
            "eager": st.booleans(),
        },
    ),
)
def test_whatever_is_asked_works_and_fits(
    host: Any, values: Any, owned: Any, free: float, more: float, memory: Any, options: Any
) -> None:
    host(memory[0], memory[0] * memory[1])
    try:
        plan = tiers(values, owned, free, free + more, **options)
    except ConfigError:
        return
    parsed = Settings.parse(values)
    gpu = arena = 0
    for p, size in plan.sizes.items():
        row_bytes = LAYOUTS[p].row_bytes
        check_sizes(p, owned[p], size, row_bytes, parsed.tier_options(options.get("layer_rows")))
        gpu, arena = gpu + size.slots * row_bytes, arena + size.places * row_bytes
    assert gpu + plan.staging <= free * GIB
    assert arena <= memory[0] * memory[1] * GIB
    if "auto" == values["base_pool"] == values["fp4_pool"] and "prefill_staging" not in values:
        within = (free + more) * 0.9 * GIB - more * GIB
        assert gpu + plan.staging <= max(0, within - options.get("kv", 0))
    assert set(plan.sizes) == {p for p in owned if owned[p].any()}


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    owned=st.sampled_from([masks(), masks(0.3), masks(both=True)]),
    free=st.floats(0, 30),
    memory=st.floats(11.5, 64),
)
def test_auto_works_wherever_a_layers_rows_have_room(
    host: Any, owned: Any, free: float, memory: float
) -> None:
    host(memory, memory - 1)
    plan = tiers({}, owned, free, free + 1)
    assert all(size.places >= 2 for size in plan.sizes.values())


def test_rows_of_each_precision() -> None:
    found = owned_rows({7: [BASE, FP4], 3: [BASE, BASE]})
    assert found[BASE].tolist() == [[True, True], [True, False]]
    assert found[FP4].tolist() == [[False, False], [False, True]]


def test_a_file_of_a_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "get_world_group", lambda: SimpleNamespace(rank=0))
    assert rank_file("heat_file", None) is None
    assert rank_file("heat_file", tmp_path / "heat") == tmp_path / "heat"
    monkeypatch.setattr(pools, "get_world_group", lambda: SimpleNamespace(rank=3))
    assert rank_file("heat_file", tmp_path / "heat") == tmp_path / "heat.3"
    with pytest.raises(ConfigError, match=r"routing_trace .*/x: there is no directory .*none"):
        rank_file("routing_trace", tmp_path / "none" / "x")


def test_rows_of_recovery_are_counted_where_they_are_others() -> None:
    assert all_rows({1: [BASE, FP4], 2: [BASE, BASE]}, {1: FP4}) == {
        1: [BASE, FP4, FP4],
        2: [BASE, BASE],
    }


def cpu(values: dict[str, Any], **options: Any) -> Any:
    rows = {layer: [BASE] * EXPERTS + [FP4] * EXPERTS for layer in range(LAYERS)}
    return size_pools(Settings.parse(values), rows, LAYOUTS, config(**options))


def test_cpu_pools_leave_what_the_planner_leaves(host: Any) -> None:
    host(64, 60)
    assert {p: of.slots for p, of in cpu({}).items()} == {BASE: 640, FP4: 640}
    host(16, 14)
    found = cpu({})
    taken = sum(of.slots * LAYOUTS[p].row_bytes for p, of in found.items())
    reserve = reserve_for(config(), gpu=False)
    # Of 16 GiB: system, vLLM's processes, activations, KV cache.
    assert taken <= 16 * GIB - 7 * GIB - reserve.workspace["activations"] - reserve.kv_cache.nbytes(
        8192, 1
    )
    assert taken > 5 * GIB
    assert found[BASE].slots == pytest.approx(found[FP4].slots, abs=2)
    assert "stay in reserve" in found[BASE].reason


def test_cpu_pools_stay_within_a_containers_limit(host: Any) -> None:
    host(12, 10)
    first = cpu({})
    host(12, 6)
    second = cpu({})
    host(11, 10)
    assert cpu({})[BASE].slots < first[BASE].slots > second[BASE].slots
    host(4, 3)
    assert cpu({})[BASE].slots == 0


def test_a_cpu_pool_that_is_set_is_taken_from_what_is_shared(host: Any) -> None:
    host(16, 14)
    found = cpu({"fp4_pool": "10%"})
    assert found[FP4].slots == 64
    assert found[BASE].slots > cpu({})[BASE].slots
    assert cpu({"fp4_pool": "10%"}, kv=5 * GIB)[BASE].slots < found[BASE].slots
