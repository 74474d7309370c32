"""An FP8 checkpoint of another family, with chunked prefill: Qwen3-MoE on plain attention."""

import pytest

from moet.checkpoints import Checkpoint
from moet.eval.pack import packed_experts
from moet.eval.reference import load_reference
from moet.formats import Precision
from moet.pack import Pack, PackRowSource
from tests.fixtures.checkpoints import write_checkpoint
from tests.vllm.serving import (
    engine,
    generate,
    make_pack,
    prompt_logprobs,
    prompts,
    reference_logprobs,
)

pytestmark = pytest.mark.server
IDS = prompts(256)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    place = tmp_path_factory.mktemp("qwen3")
    model = write_checkpoint(place / "model", "qwen3_moe", "fp8_block", experts=16)
    pack = make_pack(model, place / "pack")
    settings = {"pack": str(pack), "precision": "fp4"}
    # 48 tokens a step: prompts are cut, and their pieces run beside tokens being decoded.
    with engine(model, settings, max_num_batched_tokens=48, block_size=32) as llm:
        llm.collective_rpc("moet_record_logits")
        yield llm, model, pack


def test_fp4_of_an_fp8_checkpoint(served):
    llm, model, pack = served
    with (
        Checkpoint.open(model) as checkpoint,
        PackRowSource(Pack.open(pack), checkpoint) as source,
    ):
        reference = load_reference(checkpoint, packed_experts(source, Precision.MXFP4))
    expected = reference_logprobs(reference, IDS)
    for ours, theirs in zip(prompt_logprobs(llm, IDS), expected, strict=True):
        assert (ours - theirs).abs().max() < 1e-4 if len(ours) else True


def test_chunked_prefill_from_any_pool(served):
    llm, _, pack = served
    runs = []
    for pool, policy in [("100%", "lru"), ("50%", "lfu"), ("25%", "lru"), ("10%", "static")]:
        settings = {"pack": str(pack), "base_pool": pool, "policy": policy, "streaming_slots": 3}
        llm.collective_rpc("moet_configure", args=(settings,))
        llm.collective_rpc("moet_digest")
        outputs = generate(llm, IDS, 12, logprobs=1)
        tokens = [o.outputs[0].token_ids for o in outputs]
        runs.append((tokens, llm.collective_rpc("moet_digest")))
    assert all(run == runs[0] for run in runs[1:])
    (stats,) = llm.collective_rpc("moet_stats")
    assert stats["evictions"] > 0
