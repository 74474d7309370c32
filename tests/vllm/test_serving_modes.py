"""Speculation, tensor parallelism, compiled mode, damage while serving, and vLLM without moet."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from moet.checkpoints import Checkpoint
from moet.eval.reference import load_reference
from moet.eval.sources import fp4_experts
from moet.pack import Pack
from tests.fixtures.checkpoints import write_checkpoint
from tests.vllm.serving import NANO, engine, generate, make_pack, prompts, reference_tokens

pytestmark = pytest.mark.server
IDS = prompts(8192, (40, 7, 21, 3))
TOKENS = 16


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    return make_pack(NANO, tmp_path_factory.mktemp("nano") / "pack")


@pytest.fixture(scope="module")
def expected():
    """Greedy tokens of the FP4 model in transformers."""
    with Checkpoint.open(NANO) as checkpoint:
        model = load_reference(checkpoint, fp4_experts(checkpoint))
    return reference_tokens(model, IDS, TOKENS)


def tokens(llm, ids=IDS):
    return [list(o.outputs[0].token_ids) for o in generate(llm, ids, TOKENS)]


def test_speculative_decoding_with_the_draft_head(pack, expected):
    settings = {"pack": str(pack), "precision": "fp4", "fp4_pool": "40%"}
    speculative = {
        "method": "mtp",
        "num_speculative_tokens": 1,
        "attention_backend": "CPU_MLA",  # for the same reason as in `engine`
    }
    with engine(NANO, settings, speculative_config=speculative, disable_log_stats=False) as llm:
        assert tokens(llm) == expected
        counts = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    accepted = counts["vllm:spec_decode_num_accepted_tokens"]
    assert accepted > 0.3 * counts["vllm:spec_decode_num_drafts"]


def test_two_ranks_hold_half_a_row_each(expected, monkeypatch, tmp_path):
    """And with the plain rotary embedding, which vLLM's CPU kernel gets wrong on MLA: nano-moe's
    YaRN by 1 is the same rotation."""
    model = tmp_path / "plain"
    shutil.copytree(NANO, model)
    config = json.loads((NANO / "config.json").read_text())
    del config["rope_scaling"]
    (model / "config.json").write_text(json.dumps(config))
    pack = make_pack(model, tmp_path / "pack")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    settings = {"pack": str(pack), "precision": "fp4", "fp4_pool": "40%"}
    with engine(model, settings, tensor_parallel_size=2) as llm:
        assert tokens(llm) == expected
        first, second = llm.collective_rpc("moet_stats")
    assert first["pools"] == second["pools"]
    assert first["disk_bytes"] == second["disk_bytes"] > 0


def test_compiled_and_then_damaged(tmp_path, capfd):
    # Two layers, since the compiler's time is most of this test's.
    model = write_checkpoint(tmp_path / "model", "deepseek_v3", "nvfp4", experts=32, layers=2)
    pack = make_pack(model, tmp_path / "pack")
    with Checkpoint.open(model) as checkpoint:
        reference = load_reference(checkpoint, fp4_experts(checkpoint))
    ids = prompts(256, (40, 7, 21, 3))
    expected = reference_tokens(reference, ids, TOKENS)
    with engine(model, {"pack": str(pack), "precision": "fp4"}, enforce_eager=False) as llm:
        assert tokens(llm, ids) == expected
        small = {"pack": str(pack), "base_pool": "10%", "streaming_slots": 2}
        llm.collective_rpc("moet_configure", args=(small,))
        assert tokens(llm, ids) == tokens(llm, ids)
        probe = prompts(256, (60,), seed=1)
        before = tokens(llm, probe)
        llm.reset_prefix_cache()
        layer = Pack.open(pack).layers[1]
        whole = layer.path.read_bytes()
        with open(layer.path, "r+b") as file:
            for expert in range(32):
                at = layer.layout.row_offset(layer.layout.base.precision, expert) + 100
                file.seek(at)
                file.write(bytes([whole[at] ^ 1]))
        # Every request of the step ends with an error and no token; the engine serves on.
        outputs = generate(llm, [*probe, *prompts(256, (9,), seed=2)], 4)
        assert [o.outputs[0].finish_reason for o in outputs] == ["error", "error"]
        assert not any(o.outputs[0].token_ids for o in outputs)
        with open(layer.path, "r+b") as file:
            file.write(whole)
        # Nothing of the failed step is left: not in residency, not in the prefix cache.
        assert tokens(llm, probe) == before
    log = capfd.readouterr()
    assert f"{layer.path}: layer 1 expert" in log.out + log.err
    assert "requests end with an error" in log.out + log.err


# Imports where workers, which import the script too, do not see them (see moet.vllm.config).
_STOCK = """
if __name__ == "__main__":
    import json, sys
    from pathlib import Path
    from tests.vllm.serving import engine, generate, prompts
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader

    with engine(Path(sys.argv[1]), None, dtype="bfloat16") as llm:
        outputs = generate(llm, prompts(256, (9, 30)), 12, logprobs=1)
    found = [(list(o.outputs[0].token_ids), o.outputs[0].cumulative_logprob) for o in outputs]
    print(json.dumps([found, type(get_model_loader(LoadConfig())).__name__]))
"""


def test_without_moet_vllm_is_the_same(tmp_path):
    model = write_checkpoint(tmp_path / "model", "qwen3_moe", "bf16")
    (tmp_path / "stock.py").write_text(_STOCK)
    runs = []
    for plugins in ({}, {"VLLM_PLUGINS": ""}):
        environment = {k: v for k, v in os.environ.items() if k != "VLLM_PLUGINS"}
        environment |= plugins | {"PYTHONPATH": str(NANO.parents[1])}
        # Both at once: most of the time goes into imports.
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        runs.append(
            subprocess.Popen(
                [sys.executable, str(tmp_path / "stock.py"), str(model)],
                env=environment | {"OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    outputs = [run.communicate()[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0]
    (first, loader), second = (json.loads(output.splitlines()[-1]) for output in outputs)
    assert [first, loader] == second
    assert loader == "DefaultModelLoader"
    assert all(len(tokens) > 10 for tokens, _ in first)
