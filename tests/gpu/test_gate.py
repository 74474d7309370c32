"""FP4 recovery in real vLLM on a GPU, with CUDA graphs: the gate, FP4 prompts, the adaptive set.

Each engine is booted once, plays all that is asked of it, and is closed; the tests compare what was
recorded. The checkpoint is NVFP4, so FP4 rows are its own.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from tests.vllm.serving import NANO, engine, generate, make_pack, prompts

pytestmark = pytest.mark.gpu

IDS = prompts(8192, (3, 17, 40, 64, 1, 90, 5, 33, 12, 28, 7, 51, 2, 80, 19, 44))
LONG = prompts(8192, (200, 200), seed=1)
TOKENS = 24
TAU = 0.6
# The recovery engines hold half of the base rows and fewer FP4 rows on the GPU, so that both move.
SMALL = {"base_pool": "50%", "fp4_pool": "30%", "arena": "100%"}

Answers = list[list[tuple[int, dict[int, float]]]]
Recording = dict[str, Any]


def run(llm, ids=IDS, tokens=TOKENS) -> Answers:
    """Of each request the tokens, and with each the log-probabilities of three, to the last bit."""
    outputs = generate(llm, ids, tokens, logprobs=3)
    return [
        [
            (token, {t: of.logprob for t, of in row.items()})
            for token, row in zip(o.outputs[0].token_ids, o.outputs[0].logprobs, strict=True)
        ]
        for o in outputs
    ]


def tokens_of(answers: Answers) -> list[list[int]]:
    return [[token for token, _ in answer] for answer in answers]


def answers(llm) -> Recording:
    """With an empty prefix cache: all at once, four one by one, and two prompts whose first half is
    in the cache."""
    llm.reset_prefix_cache()
    together = run(llm)
    llm.reset_prefix_cache()
    alone = [run(llm, [ids])[0] for ids in IDS[:4]]
    first = run(llm, LONG)
    before = metric(llm, "vllm:prefix_cache_hits")
    follow = run(llm, [ids[:128] + more for ids, more in zip(LONG, IDS[2:4], strict=True)])
    hits = metric(llm, "vllm:prefix_cache_hits") - before
    return {"together": together, "alone": alone, "first": first, "follow": follow, "hits": hits}


def metric(llm, name: str) -> float:
    return sum(getattr(of, "value", 0) for of in llm.get_metrics() if of.name == name)


def set_gate(llm, tau: float, cap: float = 1.0) -> None:
    for answer in llm.collective_rpc("moet_gate", args=(tau, cap)):
        assert answer == {"tau": tau, "cap": cap}


def resize(llm) -> None:
    """So that most rows are elsewhere than on the GPU, and some on disk."""
    sizes = {"base_pool": "20%", "fp4_pool": "20%", "arena": "40%"}
    for answer in llm.collective_rpc("moet_resize", args=(sizes,)):
        assert "error" not in answer, answer


def stats(llm) -> Recording:
    """Of the first rank."""
    return llm.collective_rpc("moet_stats")[0]


def figures(llm) -> dict[str, float]:
    """The gate's counts, which every rank has by itself."""
    ranks = [
        {of["name"]: of["value"] for of in stats["further"] if of["name"] != "gate_seconds"}
        for stats in llm.collective_rpc("moet_stats")
    ]
    assert all(rank == ranks[0] for rank in ranks), ranks
    return ranks[0]


def doubt(llm, ids=IDS, cap: float = 1.0) -> tuple[Answers, dict[str, float]]:
    """What is answered with an empty prefix cache, and the gate's counts meanwhile."""
    set_gate(llm, TAU, cap)
    llm.reset_prefix_cache()
    before = figures(llm)
    answers = run(llm, ids)
    now = figures(llm)
    return answers, {key: now[key] - before[key] for key in now}


def play_plain(llm) -> Recording:
    return answers(llm)


def play_gate(llm) -> Recording:
    """Off, always, in doubt (capped, twice, and with most rows elsewhere), off again."""
    found: Recording = {"start": figures(llm)}
    set_gate(llm, 0.0)
    found["off"] = answers(llm)
    found["never"] = figures(llm)
    set_gate(llm, 1.0)
    found["always"] = answers(llm)
    found["all"] = figures(llm)
    for name, cap in (("capped", 0.25), ("doubt", 1.0), ("again", 1.0), ("elsewhere", 1.0)):
        if name == "elsewhere":
            resize(llm)
        found[name], found[f"{name} counts"] = doubt(llm, cap=cap)
    set_gate(llm, 0.0)
    found["off again"] = answers(llm)
    found["stats"] = stats(llm)
    return found


def play_alone_and_beside(llm) -> Recording:
    """Twice as many requests as run at once, so that prompts join others that are decoded; one
    after the other; and all once more, without graphs for the second pass."""
    ids = IDS + [ids[::-1] for ids in IDS]
    beside, counts = doubt(llm, ids)
    preemptions = metric(llm, "vllm:num_preemptions")
    llm.reset_prefix_cache()
    alone = [run(llm, [of], len(found))[0] for of, found in zip(ids, beside, strict=True)]
    llm.collective_rpc("moet_release_second_pass")
    pieces, pieces_counts = doubt(llm, ids)
    return {
        "beside": beside, "counts": counts, "preemptions": preemptions, "alone": alone,
        "pieces": pieces, "pieces counts": pieces_counts,
    }  # fmt: skip


def play_prompts(llm) -> Recording:
    """Prompts at FP4 that join requests which are decoded, the gate off, in doubt, and always."""
    ids = IDS + [ids[::-1] for ids in IDS]
    found: Recording = {}
    set_gate(llm, 0.0)
    found["off"] = answers(llm)
    for name in ("doubt", "again", "elsewhere"):
        if name == "elsewhere":
            resize(llm)
        found[name], found[f"{name} counts"] = doubt(llm, ids)
    set_gate(llm, 1.0)
    found["always"] = answers(llm)
    return found


def play_adaptive(llm) -> Recording:
    runs = []
    for _ in range(3):
        llm.reset_prefix_cache()
        runs.append(run(llm, IDS[:4]))
    return {"runs": runs, "figures": figures(llm), "stats": stats(llm)}


INVARIANT = {"VLLM_BATCH_INVARIANT": "1"}
V1 = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
ADAPTIVE = {"adaptive": {"every": 4, "margin": 1.2}, "fp4_pool": "30%"}
TWO = {"tensor_parallel_size": 2}
FEW_BLOCKS = {"block_size": 16, "num_gpu_blocks_override": 32}
PROFILED = {"kv_cache_memory_bytes": None, "gpu_memory_utilization": 0.4}  # as it is by default
ENGINES: dict[str, tuple[Recording, dict[str, str], Recording, Callable[[Any], Recording]]] = {
    "base": ({}, {}, {}, play_plain),
    "fp4": ({"precision": "fp4"}, {}, {}, play_plain),
    "prompts": ({"prefill_precision": "fp4"}, {}, {}, play_plain),
    "gate": ({"gate": {}, **SMALL}, {}, {}, play_gate),
    "gate, prompts": (
        {"gate": {}, "prefill_precision": "fp4", **SMALL}, {}, PROFILED, play_prompts,
    ),
    "two ranks": ({"gate": {}, **SMALL}, {}, TWO, play_gate),
    "two ranks, base": ({}, {}, TWO, play_plain),
    "two ranks, fp4": ({"precision": "fp4"}, {}, TWO, play_plain),
    "first runner": ({"gate": {}, **SMALL}, V1, {}, play_gate),
    "first runner, base": ({}, V1, {}, play_plain),
    "first runner, fp4": ({"precision": "fp4"}, V1, {}, play_plain),
    "invariant": ({"gate": {}, **SMALL}, INVARIANT, {}, play_alone_and_beside),
    "invariant, prompts": (
        {"gate": {}, "prefill_precision": "fp4", **SMALL}, INVARIANT, {}, play_alone_and_beside,
    ),
    "invariant, preempted": ({"gate": {}, **SMALL}, INVARIANT, FEW_BLOCKS, play_alone_and_beside),
    "adaptive": (ADAPTIVE, {}, {}, play_adaptive),
    "adaptive again": (ADAPTIVE | {"base_pool": "20%", "arena": "60%"}, {}, {}, play_adaptive),
}  # fmt: skip
RUNNERS = ("", "first runner, ", "two ranks, ")


def record(name: str, pack: Path) -> Recording:
    settings, environment, options, play = ENGINES[name]
    if options.get("tensor_parallel_size", 1) > torch.cuda.device_count():
        pytest.skip("needs two GPUs")
    defaults: Recording = {
        "dtype": "bfloat16", "enforce_eager": False, "max_num_seqs": 16, "attention_backend": None,
        "gpu_memory_utilization": 0.1, "disable_log_stats": False,
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for key, value in environment.items():
            patch.setenv(key, value)
        with engine(NANO, {"pack": str(pack), **settings}, **defaults | options) as llm:
            return play(llm)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Callable[[str], Recording]:
    pack = make_pack(NANO, tmp_path_factory.mktemp("nano") / "pack")
    return cache(lambda name: record(name, pack))


@pytest.mark.parametrize("runner", RUNNERS)
def test_always_in_doubt_is_fp4_bit_for_bit(recorded, runner):
    """Follow-up requests, too: they read the KV cache that the first ones have left."""
    gate = recorded((runner or "gate, ").removesuffix(", "))
    always, fp4 = gate["always"], recorded(f"{runner}fp4")
    assert always["hits"] == fp4["hits"] >= 128
    assert always == fp4
    asked = sum(len(of) for name, part in always.items() if name != "hits" for of in part)
    assert gate["all"]["gate_fired"] - gate["never"]["gate_fired"] == asked
    assert tokens_of(always["together"]) != tokens_of(gate["off"]["together"])


@pytest.mark.parametrize("runner", RUNNERS)
def test_off_is_as_without_the_setting(recorded, runner):
    gate = recorded((runner or "gate, ").removesuffix(", "))
    base = recorded(f"{runner}base")
    assert gate["off"] == base
    assert gate["off again"] == base
    assert gate["start"] == gate["never"]
    assert gate["start"]["gate_tokens"] == 0


@pytest.mark.parametrize("runner", ["gate", "first runner", "two ranks"])
def test_only_doubtful_tokens_are_decided_again(recorded, runner):
    gate = recorded(runner)
    counts = gate["doubt counts"]
    assert 0 < counts["gate_flipped"] < counts["gate_fired"] < counts["gate_tokens"]
    assert counts["gate_tokens"] == sum(map(len, gate["doubt"]))
    assert 0 < counts["gate_second_passes"] <= counts["gate_steps"]
    replays = 0 if runner == "first runner" else counts["gate_second_passes"]
    assert counts["gate_replays"] == replays
    tokens = [tokens_of(of) for of in (gate["doubt"], gate["off"]["together"])]
    assert tokens[0] != tokens[1]
    assert gate["again"] == gate["elsewhere"] == gate["doubt"]
    capped = gate["capped counts"]
    assert capped["gate_fired"] <= 0.25 * capped["gate_tokens"]
    held = {of["precision"] for of in gate["stats"]["rows"] if of["rows"]}
    assert held == {"base", "nvfp4"}
    assert gate["stats"]["promotions"] > 0
    assert gate["stats"]["disk_reads"] > 192  # those of the start


@pytest.mark.parametrize("name", ["invariant", "invariant, prompts"])
def test_nothing_that_runs_before_or_beside_a_request_changes_a_bit(recorded, name):
    """Where vLLM's own layers are batch-invariant; the experts are then. Nor does a graph."""
    found = recorded(name)
    assert found["beside"] == found["alone"] == found["pieces"]
    counts, pieces = found["counts"], found["pieces counts"]
    assert 0.2 < counts["gate_fired"] / counts["gate_tokens"] < 0.95
    assert counts["gate_replays"] == counts["gate_second_passes"] == pieces["gate_second_passes"]
    assert pieces["gate_replays"] == 0


def test_requests_that_are_preempted_and_resumed(recorded):
    """Tokens: what was decoded is computed again as a prompt, by other kernels of vLLM's."""
    found = recorded("invariant, preempted")
    assert found["preemptions"] > 0
    assert tokens_of(found["beside"]) == tokens_of(found["alone"]) == tokens_of(found["pieces"])


def test_prompts_at_fp4_beside_doubtful_tokens(recorded):
    """Steps of both kinds are mixed; sizes are those of an engine that has measured its memory."""
    found = recorded("gate, prompts")
    assert found["off"] == recorded("prompts")
    assert found["always"] == recorded("fp4")
    assert found["doubt"] == found["again"] == found["elsewhere"]
    counts = found["doubt counts"]
    assert counts["gate_replays"] == counts["gate_second_passes"] > 0
    assert counts["gate_tokens"] == sum(map(len, found["doubt"]))


def test_prompts_at_fp4(recorded):
    """The first token's logits are those of FP4, and the next ones are not."""
    prompt, fp4, base = recorded("prompts"), recorded("fp4"), recorded("base")
    firsts = [[answer[0] for answer in of["together"]] for of in (prompt, fp4, base)]
    assert firsts[0] == firsts[1] != firsts[2]
    for other in (fp4, base):
        assert tokens_of(prompt["together"]) != tokens_of(other["together"])


def test_the_adaptive_set_follows_what_is_decoded(recorded):
    found, again = recorded("adaptive"), recorded("adaptive again")
    base = recorded("base")
    assert found["figures"]["history_dependent"] == 1
    assert 15 < found["figures"]["hot_set_rows"] <= 29  # of 96
    assert len(set(map(str, found["runs"]))) > 1
    assert tokens_of(found["runs"][-1]) != tokens_of(base["together"][:4])
    assert again["runs"] == found["runs"]  # steps decide, not where rows are
    held = {of["precision"] for of in found["stats"]["rows"] if of["rows"]}
    assert held == {"base", "nvfp4"}
