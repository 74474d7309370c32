"""The embedded model served by vLLM: right at each precision, and the same from any pool."""

import itertools
from collections import Counter

import pytest

from moet.checkpoints import Checkpoint
from moet.eval.pack import packed_experts
from moet.eval.reference import load_reference
from moet.eval.sources import fp4_experts
from moet.formats import Precision
from moet.pack import Pack, PackRowSource
from moet.residency.tiers import Tier, TierOptions, TierSizes
from moet.residency.tiers.simulate import simulate
from moet.residency.tiers.trace import RoutingTrace
from tests.vllm.serving import (
    NANO,
    engine,
    generate,
    make_pack,
    prompt_logprobs,
    prompts,
    reference_logprobs,
)

pytestmark = pytest.mark.server
IDS = prompts(8192)


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    return make_pack(NANO, tmp_path_factory.mktemp("nano") / "pack")


@pytest.fixture(scope="module")
def llm(pack):
    with engine(NANO, {"pack": str(pack), "precision": "fp4"}) as llm:
        llm.collective_rpc("moet_record_logits")
        yield llm


def configure(llm, pack, **settings):
    llm.collective_rpc("moet_configure", args=({"pack": str(pack), **settings},))


def test_fp4_is_the_checkpoint_itself(llm):
    with Checkpoint.open(NANO) as checkpoint:
        model = load_reference(checkpoint, fp4_experts(checkpoint))
    expected = reference_logprobs(model, IDS)
    for ours, theirs in zip(prompt_logprobs(llm, IDS), expected, strict=True):
        assert (ours - theirs).abs().max() < 1e-4 if len(ours) else True


def test_base_is_the_pack_decoded(llm, pack):
    with (
        Checkpoint.open(NANO) as checkpoint,
        PackRowSource(Pack.open(pack), checkpoint) as source,
    ):
        model = load_reference(checkpoint, packed_experts(source, Precision.BASE))
    expected = reference_logprobs(model, IDS)
    for operator in ("cpu", "reference"):
        configure(llm, pack, operator=operator)
        for ours, theirs in zip(prompt_logprobs(llm, IDS), expected, strict=True):
            assert (ours - theirs).abs().max() < 1e-4 if len(ours) else True


@pytest.fixture(scope="module")
def all_resident(llm, pack):
    """Tokens and logits with room for every row."""
    configure(llm, pack, base_pool="100%")
    return run(llm)


def run(llm):
    llm.collective_rpc("moet_digest")
    outputs = generate(llm, IDS, 12, prompt_logprobs=1, logprobs=1)
    (stats,) = llm.collective_rpc("moet_stats")
    return [o.outputs[0].token_ids for o in outputs], llm.collective_rpc("moet_digest"), stats


@pytest.mark.parametrize(
    ("pool", "policy"), list(itertools.product(["50%", "25%", "10%"], ["lru", "lfu", "static"]))
)
def test_no_pool_and_no_policy_changes_a_bit(llm, pack, all_resident, pool, policy):
    configure(llm, pack, base_pool=pool, policy=policy)
    tokens, digest, stats = run(llm)
    assert (tokens, digest) == all_resident[:2]
    assert stats["evictions"] > 0
    assert stats["disk_bytes"] > all_resident[2]["disk_bytes"]
    assert {of["phase"] for of in stats["rows"] if of["rows"]} == {"decode", "scan"}


def test_a_map_mixes_precisions_and_pools_change_nothing(llm, pack, tmp_path):
    with Checkpoint.open(NANO) as checkpoint:
        identity = checkpoint.identity
    path = tmp_path / "map.json"
    path.write_text(
        '{"model": "%s", "fp4": {"1": [0, 5, 7], "3": "all"}}' % identity  # noqa: UP031
    )
    configure(llm, pack, precision=str(path), base_pool="100%", fp4_pool="100%")
    tokens, digest, _ = run(llm)
    configure(llm, pack, precision=str(path), base_pool="20%", fp4_pool="30%", streaming_slots=4)
    again = run(llm)
    assert (tokens, digest) == again[:2]
    assert {of["precision"] for of in again[2]["rows"] if of["rows"]} == {"base", "nvfp4"}


def test_a_recorded_trace_is_what_was_served(llm, pack, tmp_path):
    """All of it; and the simulation of the tiers predicts about the hits that the pools had."""
    path = tmp_path / "trace.safetensors"
    configure(llm, pack, base_pool="50%", policy="static", routing_trace=str(path))
    _, _, stats = run(llm)
    configure(llm, pack)  # ends the recording
    trace = RoutingTrace.load(path)
    served = {phase: Counter() for phase in ("decode", "scan")}
    for of in stats["rows"]:
        served[of["phase"]][of["tier"]] += of["rows"]
    in_prompts = trace.prefill[trace.step]
    assert served["scan"].total() == in_prompts.sum() > 0
    assert served["decode"].total() == (~in_prompts).sum() > 0
    assert int(trace.use(trace.steps).sum()) == served["decode"].total()
    slots = stats["pools"]["base"]["slots"]
    options = TierOptions(policy="static", plan_every=1, streaming=8)
    predicted = simulate(trace, TierSizes(0, slots), options)
    live = served["decode"]["memory"] / served["decode"].total()
    assert predicted.share(Tier.ARENA) == pytest.approx(live, abs=0.1)
