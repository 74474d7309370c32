"""Rows of layers that are routed by the token's id are read before the layers ask, in real vLLM."""

import pytest

from tests.vllm.serving import NANO, engine, generate, make_pack, prompts

pytestmark = pytest.mark.server
IDS = prompts(8192)


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    return make_pack(NANO, tmp_path_factory.mktemp("nano") / "pack")


@pytest.fixture(scope="module")
def llm(pack):
    options = {"worker_extension_cls": "tests.vllm.hashed.HashedTestExtension"}
    with engine(NANO, {"pack": str(pack)}, **options) as llm:
        llm.collective_rpc("moet_record_logits")
        yield llm


def run(llm, pack, pool):
    llm.collective_rpc("moet_configure", args=({"pack": str(pack), "base_pool": pool},))
    llm.collective_rpc("moet_digest")
    outputs = generate(llm, IDS, 12, prompt_logprobs=1)
    (stats,) = llm.collective_rpc("moet_stats")
    return [o.outputs[0].token_ids for o in outputs], llm.collective_rpc("moet_digest"), stats


@pytest.fixture(scope="module")
def all_resident(llm, pack):
    return run(llm, pack, "100%")


@pytest.mark.parametrize("pool", ["50%", "25%", "15%"])
def test_same_bits_and_rows_read_ahead(llm, pack, all_resident, pool):
    assert all_resident[2]["prefetched_rows"] == 0
    tokens, digest, stats = run(llm, pack, pool)
    assert (tokens, digest) == all_resident[:2]
    missed = sum(of["rows"] for of in stats["rows"] if of["tier"] == "disk")
    assert 0 < stats["prefetched_rows"] < missed
