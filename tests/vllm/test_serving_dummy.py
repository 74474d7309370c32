"""`--load-format dummy`: random experts, for a model of which there is only a config.json."""

import json

import pytest

from moet.checkpoints import family_of
from moet.formats.layout import Precision
from moet.pack.dummy import DummyRowSource
from tests.fixtures.checkpoints import write_checkpoint
from tests.vllm.serving import engine, generate, prompts

pytestmark = pytest.mark.server


def test_random_experts_from_memory_and_from_a_file(tmp_path):
    whole = write_checkpoint(tmp_path / "whole", "qwen3_moe", "bf16")
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_bytes((whole / "config.json").read_bytes())
    config = json.loads((model / "config.json").read_text())
    source = DummyRowSource(family_of(config).geometry(config))
    rows = tmp_path / "rows.bin"
    source.write_rows(rows, Precision.BASE, 16)
    ids = prompts(256, (9, 30))
    outputs = []
    for settings in ({"base_pool": "50%"}, {"base_pool": "50%", "pack": str(rows)}):
        with engine(model, settings, load_format="dummy", skip_tokenizer_init=True) as llm:
            outputs.append([list(o.outputs[0].token_ids) for o in generate(llm, ids, 8)])
            (stats,) = llm.collective_rpc("moet_stats")
            assert (stats["disk_bytes"] > 0) == ("pack" in settings)
    # The file's rows are the same ones in the same order.
    assert outputs[0] == outputs[1]
    assert [len(o) for o in outputs[0]] == [8, 7]
