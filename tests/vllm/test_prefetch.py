"""Rows of layers that are routed by the token's id are read before the layers ask, in real vLLM."""

import json
from types import SimpleNamespace

import pytest

from moet.formats.layout import Precision
from moet.pack import Pack
from tests.vllm.hash_table import hash_table
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


def test_a_damaged_row_that_is_read_ahead_ends_its_step_alone(llm, pack):
    """Experts of a hash-routed layer that no other prompt uses."""
    config = SimpleNamespace(**json.loads((NANO / "config.json").read_text()))
    table = hash_table(config, 1)
    damaged = table[100].tolist()
    whole = [t for t in range(3, len(table)) if not set(table[t].tolist()) & set(damaged)]
    good = [[whole[i] for i in p[:40]] for p in prompts(len(whole))]
    settings = {"pack": str(pack), "base_pool": "15%"}
    llm.collective_rpc("moet_configure", args=(settings,))
    expected = [o.outputs[0].token_ids for o in generate(llm, good, 1)]
    layer = Pack.open(pack).layers[1]
    content = layer.path.read_bytes()
    try:
        with layer.path.open("r+b") as file:
            for expert in damaged:
                at = layer.layout.row_offset(Precision.BASE, expert) + 100
                file.seek(at)
                file.write(bytes([content[at] ^ 1]))
        llm.collective_rpc("moet_configure", args=(settings,))
        for ids, reason in ((good, "length"), ([[100, 101]], "error"), (good, "length")):
            outputs = generate(llm, ids, 1)
            assert {o.outputs[0].finish_reason for o in outputs} == {reason}
            if reason == "length":
                assert [o.outputs[0].token_ids for o in outputs] == expected
        (stats,) = llm.collective_rpc("moet_stats")
        assert stats["read_errors"] > 0
        assert stats["prefetched_rows"] > 0
    finally:
        layer.path.write_bytes(content)
