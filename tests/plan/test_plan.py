"""Plans as a whole: tiers, ranks, what is missing, and properties that hold on any hardware."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moet.checkpoints import Geometry
from moet.errors import ConfigError, UnsupportedError
from moet.formats.layout import Precision
from moet.plan.advice import advise
from moet.plan.curve import curve
from moet.plan.inventory import Inventory, Part, Role, Split
from moet.plan.machine import GIB, Disk, Machine, host_bandwidth, parse_gpus
from moet.plan.model_files import ModelFiles
from moet.plan.plan import Plan, default_workload, make_plan
from moet.plan.ranges import Range
from moet.plan.workload import Workload
from moet.residency.sizing import STREAMING_SLOTS
from moet.settings import Settings

FILES = ModelFiles("small/model", None, {}, None, True, lambda: iter(()))
DISK = Disk(None, Range(1.5e9, 3e9, 6e9))
TEXT = {
    "num_hidden_layers": 12, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128,
    "hidden_size": 2048, "max_position_embeddings": 131072,
}  # fmt: skip


def inventory(
    experts: int = 64, top_k: int = 4, layers: int = 12, dense: int = 2 * GIB
) -> Inventory:
    """A made-up model: 2048 × 1024 experts, `dense` bytes of the rest, one draft layer."""
    moe = tuple(range(layers + 1))
    geometry = Geometry("Made", 2048, 1024, experts, top_k, layers, moe, (layers,), None)
    shared = {Split.SHARDED: dense * 7 // 8, Split.REPLICATED: dense // 8}
    parts = {role: Part() for role in Role}
    parts[Role.DENSE] = Part(shared, dense // 2)
    parts[Role.EXPERTS] = Part({Split.SHARDED: layers * experts * 3_350_000})
    parts[Role.DRAFT] = Part({Split.SHARDED: dense // 20})
    parts[Role.DRAFT_EXPERTS] = Part({Split.SHARDED: experts * 3_350_000})
    return Inventory(geometry, TEXT, Precision.MXFP4, True, layers * experts * 6, parts)


def machine(gpu: str | None = "5090", ram: int = 64 * GIB, disk: Disk = DISK) -> Machine:
    product, count = (None, 0) if gpu is None else parse_gpus(gpu)
    return Machine(product, count, ram, host_bandwidth(8), 8, disk)


def with_memory(where: Machine, nbytes: int) -> Machine:
    assert where.gpu is not None
    return replace(where, gpu=replace(where.gpu, memory=nbytes))


def plan(of: Inventory, where: Machine, **work: object) -> Plan:
    return make_plan(FILES, of, where, replace(default_workload(of, where), **work))  # type: ignore[arg-type]


MODELS = st.builds(
    inventory,
    experts=st.sampled_from([16, 64, 256]),
    top_k=st.integers(1, 8),
    layers=st.integers(1, 12),
    dense=st.integers(GIB // 4, 4 * GIB),
)
MACHINES = st.builds(
    lambda gpu, memory, ram: with_memory(machine(gpu, ram), memory),
    st.sampled_from(["5090", "4090×2", "H200", "24GiB:1000GB/s", "RTX PRO 6000×4"]),
    st.integers(4 * GIB, 40 * GIB),
    st.integers(8 * GIB, 128 * GIB),
)
WORK = st.fixed_dictionaries(
    {
        "context": st.sampled_from([1024, 32768]),
        "streams": st.sampled_from([1, 3, 16]),
        "drafts": st.integers(0, 2),
        "kv_dtype": st.sampled_from(["auto", "fp8"]),
    }
)
CPUS = st.builds(machine, st.none(), st.integers(8 * GIB, 128 * GIB))


@settings(max_examples=60, deadline=None)
@given(MODELS, st.one_of(MACHINES, CPUS), WORK)
def test_tiers_sum_and_everything_is_in_bounds(
    of: Inventory, where: Machine, work: dict[str, object]
) -> None:
    made = plan(of, where, **work)
    placed = made.placement
    assert placed.pool + placed.arena + placed.disk == placed.rows == of.rows
    assert min(placed.pool, placed.arena, placed.disk) >= 0
    assert 0 <= placed.pool_coverage <= placed.memory_coverage <= 1
    tp = max(1, where.count)
    assert placed.pool * made.need.row <= placed.budget
    if where.gpu is not None:
        held = made.need.fixed + placed.pool * made.need.row + placed.buffers
        assert made.missing or held <= where.gpu.memory * made.workload.utilization
        assert placed.arena_bytes == placed.arena * made.need.row * tp
    assert made.missing or made.host_load_peak() <= where.ram
    assert (made.decode is None) == bool(made.missing)
    for prediction in filter(None, (made.decode, made.prefill)):
        assert 0 < prediction.rate.low <= prediction.rate.typical <= prediction.rate.high
        assert prediction.limit in prediction.seconds
        assert 0 <= prediction.hits.low <= prediction.hits.high <= 1


@settings(max_examples=60, deadline=None)
@given(MODELS, MACHINES, WORK, st.integers(0, 64 * GIB), st.integers(0, 64 * GIB))
def test_more_memory_is_never_slower(
    of: Inventory, where: Machine, work: dict[str, object], more: int, more_ram: int
) -> None:
    assert where.gpu is not None
    small = plan(of, where, **work)
    large = plan(
        of,
        replace(with_memory(where, where.gpu.memory + more), ram=where.ram + more_ram),
        **work,
    )
    if small.missing:
        return
    assert not large.missing
    for before, after in ((small.decode, large.decode), (small.prefill, large.prefill)):
        assert before is not None
        assert after is not None
        for end in ("low", "typical", "high"):
            assert getattr(after.rate, end) >= getattr(before.rate, end) * (1 - 1e-9)


@settings(max_examples=30, deadline=None)
@given(MODELS, CPUS, st.integers(0, 64 * GIB))
def test_more_ram_is_never_slower_without_a_gpu(of: Inventory, where: Machine, more: int) -> None:
    small, large = plan(of, where), plan(of, replace(where, ram=where.ram + more))
    if small.decode is not None:
        assert large.decode is not None
        assert large.decode.rate.typical >= small.decode.rate.typical * (1 - 1e-9)


@settings(max_examples=20, deadline=None)
@given(MODELS, st.one_of(MACHINES, CPUS))
def test_json_is_stable(of: Inventory, where: Machine) -> None:
    text = json.dumps(plan(of, where).to_json(), sort_keys=True)
    assert text == json.dumps(plan(of, where).to_json(), sort_keys=True)
    content = json.loads(text)
    assert content["schema"] == 1
    assert set(content) == {
        "schema", "model", "hardware", "workload", "bytes", "rank", "tiers", "host_load_peak",
        "disk", "max_context", "fits", "missing", "decode", "prefill",
    }  # fmt: skip


def test_faster_links_and_disks_are_faster() -> None:
    of = inventory(experts=256)
    slow = plan(of, machine("6GiB:1000GB/s:12GB/s", 16 * GIB), chunk=2048)
    assert not slow.missing, slow.missing
    link = plan(of, machine("6GiB:1000GB/s:24GB/s", 16 * GIB), chunk=2048)
    disk = plan(of, machine("6GiB:1000GB/s:12GB/s", 16 * GIB, Disk(None, Range.exactly(20e9))))
    assert slow.decode
    assert link.decode
    assert disk.decode
    assert link.decode.rate.typical > slow.decode.rate.typical
    assert slow.placement.disk == disk.placement.disk


def test_ranks_share_rows_and_replicate_the_rest() -> None:
    of = inventory(experts=256)
    one, four = plan(of, machine("5090")), plan(of, machine("5090×4"))
    assert four.need.row * 4 == one.need.row
    dense = one.need.weights[Role.DENSE.value]
    assert dense / 4 < four.need.weights[Role.DENSE.value] < dense / 2
    assert four.need.kv * 4 == one.need.kv
    with pytest.raises(UnsupportedError, match="3 GPUs cannot share"):
        plan(of, machine("5090×3"))


def test_streams_share_experts() -> None:
    of = inventory(experts=256)
    one, many = (plan(of, machine("H200"), streams=n, context=4096).decode for n in (1, 16))
    assert one
    assert many
    assert one.rate.typical < many.rate.typical < 16 * one.rate.typical


def test_drafting_costs_memory_and_yields_tokens() -> None:
    of = inventory()
    none, two = plan(of, machine("H200")), plan(of, machine("H200"), drafts=2)
    assert Role.DRAFT_EXPERTS.value in two.need.weights
    assert two.need.fixed > none.need.fixed
    assert none.decode
    assert two.decode
    assert two.decode.rate.high > none.decode.rate.high


def test_too_large_for_everything_says_what_is_missing() -> None:
    made = plan(inventory(dense=40 * GIB), machine("4090", 8 * GIB, Disk(GIB, DISK.bandwidth)))
    said = " ".join(made.missing)
    assert "of the memory of each GPU are missing" in said
    assert "of host memory are missing" in said
    assert "of disk are missing" in said
    assert made.decode is None
    assert made.max_context == 0


def test_a_context_that_does_not_fit_says_which_would() -> None:
    of = inventory()
    made = plan(of, machine("6GiB:1000GB/s", 64 * GIB), context=131072, chunk=2048)
    (said,) = made.missing
    assert "for the KV cache of 1 × 131,072 tokens" in said
    fits = int(said.split("; ")[1].split(" tokens")[0].replace(",", ""))
    assert 0 < fits < 131072
    again = plan(of, machine("6GiB:1000GB/s", 64 * GIB), context=fits, chunk=2048)
    assert not again.missing
    assert again.max_context >= fits


def test_ram_that_cannot_hold_a_steps_rows_is_said() -> None:
    of = inventory(experts=256, layers=12)
    made = plan(of, machine("6GiB:1000GB/s", 9 * GIB + (64 << 20)), streams=16, context=1024,
                chunk=2048)  # fmt: skip
    assert made.placement.disk
    assert any("a layer of one step needs" in said for said in made.missing)


def test_a_pool_can_be_smaller_than_what_fits() -> None:
    of = inventory(experts=256)
    half, all_of = plan(of, machine("H200"), base_pool="50%"), plan(of, machine("H200"))
    assert (half.placement.pool_coverage, all_of.placement.pool_coverage) == (0.5, 1)
    assert half.placement.arena == of.rows // 2
    more = plan(of, machine("6GiB:1000GB/s"), base_pool="100%", chunk=2048)
    assert more.placement.pool < of.rows
    with pytest.raises(ConfigError, match="base_pool 'lots'"):
        Workload(base_pool="lots")


@pytest.mark.parametrize("text", ["19", "19:96:1", "a:b", "19:96,18:97", "50:40", "19:96,120:99"])
def test_routing_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="ascending"):
        Workload(routing=text)


def test_a_hotter_routing_is_faster_where_rows_are_in_host_memory() -> None:
    of = inventory()
    where = machine("24GiB:1000GB/s")
    rates = []
    for routing in ("19:40", "19:80", "19:96,50:99"):
        decode = plan(of, where, base_pool="20%", routing=routing).decode
        assert decode is not None
        rates.append(decode.rate.typical)
    assert rates == sorted(rates)
    assert rates[0] < rates[-1]


def test_advice_is_worth_taking() -> None:
    of = inventory(experts=256, layers=12)
    made = plan(of, machine("6GiB:1000GB/s", 10 * GIB), chunk=2048)
    assert made.decode is not None
    found = advise(made)
    assert found
    assert all(one.gain is not None and one.gain >= 1.03 for one in found)
    assert "RAM, so that no expert is read from disk" in " ".join(one.change for one in found)
    broken = plan(of, machine("6GiB:1000GB/s", 64 * GIB), context=131072)
    assert broken.missing
    assert all(one.gain is None for one in advise(broken))


def test_nothing_helps_a_disk_that_is_too_small_for_the_download() -> None:
    of = inventory()
    where = machine("6GiB:1000GB/s", 64 * GIB)
    alone = make_plan(FILES, of, where)
    assert not alone.missing
    small = replace(where, disk=Disk(alone.disk.pack + 1, DISK.bandwidth))
    made = make_plan(replace(FILES, local=False), of, small)
    assert "of disk are missing" in " ".join(made.missing)
    assert advise(made) == []


def test_the_curve_rises_to_everything_resident() -> None:
    made = plan(inventory(experts=256), machine("6GiB:1000GB/s", 16 * GIB), chunk=2048)
    points = curve(made, 20)
    rates = [point.decode.typical for point in points]
    assert rates == sorted(rates)
    assert points[-1].gib == pytest.approx(made.base_bytes() / GIB)


def test_impossible_work_is_refused() -> None:
    with pytest.raises(ConfigError, match="streams is 0"):
        Workload(streams=0)
    with pytest.raises(ConfigError, match="kv_dtype 'int3'"):
        Workload(kv_dtype="int3")


def test_the_plan_streams_prefill_as_the_settings_do() -> None:
    assert Settings().pool_streaming == STREAMING_SLOTS
