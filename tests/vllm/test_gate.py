"""The confidence gate in real engines: what it computes, and that nobody's neighbours matter."""

import pytest
from vllm import SamplingParams, TokensPrompt
from vllm.sampling_params import StructuredOutputsParams

from moet.checkpoints import Checkpoint
from moet.eval.pack import packed_experts
from moet.eval.reference import load_reference
from moet.eval.sources import fp4_experts
from moet.formats import Precision
from moet.pack import Pack, PackRowSource
from tests.fixtures.checkpoints import write_checkpoint
from tests.vllm.gated_reference import decode_with_gate
from tests.vllm.serving import NANO, engine, generate, make_pack, prompts

pytestmark = pytest.mark.server
LENGTHS = (3, 17, 40, 64, 1, 90, 5, 33, 2, 28, 16, 32, 48, 7, 11, 21)
IDS = prompts(8192, LENGTHS)
TOKENS = 16
TAU = 0.5


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    return make_pack(NANO, tmp_path_factory.mktemp("nano") / "pack")


@pytest.fixture(scope="module")
def llm(pack):
    settings = {"pack": str(pack), "gate": {}, "fp4_pool": "40%"}
    with engine(NANO, settings, max_num_seqs=16) as llm:
        yield llm


@pytest.fixture(scope="module")
def models(pack):
    """The model with 2-bit experts and with FP4 experts, in transformers."""
    with (
        Checkpoint.open(NANO) as checkpoint,
        PackRowSource(Pack.open(pack), checkpoint) as source,
    ):
        return tuple(
            load_reference(checkpoint, experts)
            for experts in (packed_experts(source, Precision.BASE), fp4_experts(checkpoint))
        )


def configure(llm, pack, **settings):
    llm.collective_rpc("moet_configure", args=({"pack": str(pack), **settings},))


def gate(llm, tau, cap=1.0):
    (found,) = set(map(str, llm.collective_rpc("moet_gate", args=(tau, cap))))
    assert found == str({"tau": tau, "cap": cap})


def figures(llm):
    (stats,) = llm.collective_rpc("moet_stats")
    return {of["name"]: of["value"] for of in stats["further"]}


def run(llm, ids=IDS, tokens=TOKENS, **sampling):
    """Everything that a request is answered: tokens, and log-probabilities to the last bit."""
    outputs = generate(llm, ids, tokens, logprobs=3, **sampling)
    return [
        (
            list(o.outputs[0].token_ids),
            [{t: lp.logprob for t, lp in of.items()} for of in o.outputs[0].logprobs],
            [of and {t: lp.logprob for t, lp in of.items()} for of in o.prompt_logprobs or ()],
        )
        for o in outputs
    ]


def tokens_of(found):
    return [tokens for tokens, *_ in found]


def test_always_in_doubt_is_fp4_and_never_is_base(llm, pack):
    gate(llm, 1.0)
    always = run(llm, prompt_logprobs=0)
    assert figures(llm)["gate_fired"] == sum(len(tokens) for tokens, *_ in always)
    before = figures(llm)
    gate(llm, 0.0)
    never = run(llm, prompt_logprobs=0)
    assert figures(llm) == before | {"gate_tau": 0.0}
    configure(llm, pack, precision="fp4")
    assert run(llm, prompt_logprobs=0) == always
    configure(llm, pack)
    assert run(llm, prompt_logprobs=0) == never
    assert tokens_of(never) != tokens_of(always)
    configure(llm, pack, gate={}, fp4_pool="40%")


@pytest.mark.parametrize(
    ("tau", "cap", "prompt_fp4"), [(TAU, 1.0, False), (0.8, 0.3, False), (0.3, 1.0, True)]
)
def test_decides_as_the_definition_says(llm, pack, models, tau, cap, prompt_fp4):
    """16 requests at once, against one after the other in transformers."""
    prefill = "fp4" if prompt_fp4 else "base"
    configure(llm, pack, gate={"tau": tau, "cap": cap}, prefill_precision=prefill, fp4_pool="40%")
    found = run(llm)
    expected = [
        decode_with_gate(*models, prompt, len(tokens), tau, cap, prompt_fp4)
        for prompt, (tokens, *_) in zip(IDS, found, strict=True)
    ]
    assert tokens_of(found) == [of.tokens for of in expected]
    for (tokens, logprobs, _), of in zip(found, expected, strict=True):
        ours = [row[token] for token, row in zip(tokens, logprobs, strict=True)]
        assert ours == pytest.approx(of.logprobs, abs=1e-3)
    counts = figures(llm)
    assert counts["gate_fired"] == sum(len(of.fired) for of in expected)
    assert 0 < counts["gate_flipped"] < counts["gate_fired"] < counts["gate_tokens"]
    assert counts["gate_tokens"] == sum(len(of.tokens) for of in expected)


def test_nothing_that_runs_before_or_beside_a_request_changes_it(llm, pack):
    """Tokens: other tokens in a batch may change the last bits of vLLM's dense layers."""
    configure(llm, pack, gate={"tau": TAU}, base_pool="30%", fp4_pool="30%", streaming_slots=4)
    beside = tokens_of(run(llm))
    alone = [
        tokens_of(run(llm, [prompt], len(tokens)))[0]
        for prompt, tokens in zip(IDS, beside, strict=True)
    ]
    assert alone == beside
    (stats,) = llm.collective_rpc("moet_stats")
    assert {of["precision"] for of in stats["rows"] if of["rows"]} == {"base", "nvfp4"}
    assert stats["evictions"] > 0


def test_structured_output(llm, pack):
    configure(llm, pack, gate={"tau": 0.9}, fp4_pool="40%")
    parameters = SamplingParams(
        temperature=0,
        max_tokens=12,
        structured_outputs=StructuredOutputsParams(choice=["yes, it is", "no, it is not"]),
    )
    outputs = llm.generate(
        [TokensPrompt(prompt_token_ids=p) for p in IDS[:4]], parameters, use_tqdm=False
    )
    assert {o.outputs[0].text for o in outputs} <= {"yes, it is", "no, it is not"}
    assert figures(llm)["gate_fired"] > 0


def test_the_adaptive_hot_set_follows_what_is_decoded(llm, pack):
    configure(llm, pack)
    base = tokens_of(run(llm, IDS[:4]))
    hot = {"every": 4, "margin": 1.2}
    configure(llm, pack, adaptive=hot, fp4_pool="30%", base_pool="50%")
    runs = [tokens_of(run(llm, IDS[:4])) for _ in range(2)]
    # Experts join after eight steps; the first one is the prompts'.
    assert [tokens[:8] for tokens in runs[0]] == [tokens[:8] for tokens in base]
    assert runs[1] != base
    counts = figures(llm)
    assert counts["history_dependent"] == 1
    assert 15 < counts["hot_set_rows"] <= 29  # of 96
    (stats,) = llm.collective_rpc("moet_stats")
    assert {of["precision"] for of in stats["rows"] if of["rows"]} == {"base", "nvfp4"}
    configure(llm, pack, adaptive=hot, fp4_pool="30%", base_pool="50%")
    assert [tokens_of(run(llm, IDS[:4])) for _ in range(2)] == runs  # the history decides


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Another family on two ranks, with prefix caching, and prompts that are cut."""
    place = tmp_path_factory.mktemp("qwen3")
    model = write_checkpoint(place / "model", "qwen3_moe", "bf16", experts=16)
    settings = {"pack": str(make_pack(model, place / "pack")), "gate": {"tau": 0.04}}
    options = {
        "tensor_parallel_size": 2,
        "max_num_batched_tokens": 48,
        "block_size": 32,
        "num_gpu_blocks_override": 16,
        "disable_log_stats": False,
    }
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        environment.setenv("OMP_NUM_THREADS", "1")
        with engine(model, settings, **options) as llm:
            yield llm


def counts_of(llm):
    """The gate's counts, which every rank has by itself."""
    first, second = (
        {of["name"]: of["value"] for of in stats["further"] if of["name"] != "gate_seconds"}
        for stats in llm.collective_rpc("moet_stats")
    )
    assert first == second
    return first


def test_requests_that_are_preempted_and_resumed(ranks):
    """16 blocks hold few of 8 requests; what is computed twice must come out the same."""
    ids = prompts(256, LENGTHS[:8])
    beside = tokens_of(run(ranks, ids, 40))
    metrics = {metric.name: getattr(metric, "value", 0) for metric in ranks.get_metrics()}
    assert metrics["vllm:num_preemptions"] > 0
    counts = counts_of(ranks)
    assert 0.2 < counts["gate_fired"] / counts["gate_tokens"] < 0.8
    alone = [
        tokens_of(run(ranks, [prompt], len(tokens)))[0]
        for prompt, tokens in zip(ids, beside, strict=True)
    ]
    assert alone == beside


def test_what_was_generated_is_not_shared(ranks):
    """A prompt that another request has generated is computed as a prompt; cached prompts are
    shared."""
    prompt = prompts(256, (64,), seed=1)[0]
    ((generated, *_),) = run(ranks, [prompt], 100)
    following = prompt + generated[:90]
    ranks.reset_prefix_cache()
    fresh = run(ranks, [following], 12)
    ranks.reset_prefix_cache()
    assert tokens_of(run(ranks, [prompt], 100)) == [generated]
    before = hits(ranks)
    after = run(ranks, [following], 12)
    assert hits(ranks) - before == 32  # of 64 tokens, since the last one may have fired
    assert tokens_of(after) == tokens_of(fresh)
    for ours, theirs in zip(after[0][1], fresh[0][1], strict=True):
        assert list(ours.values()) == pytest.approx(list(theirs.values()), abs=1e-4)


def hits(llm):
    metrics = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    return metrics["vllm:prefix_cache_hits"]
