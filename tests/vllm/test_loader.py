"""The loader: every dense tensor, no expert tensor, and no byte of one read."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from torch import nn
from vllm.config.load import LoadConfig

from moet.errors import CheckpointError
from moet.vllm import loader
from tests.fixtures.checkpoints import write_checkpoint

CASES = [
    *itertools.product(["deepseek_v3", "qwen3_moe", "glm4_moe"], ["bf16", "fp8_block", "nvfp4"]),
    ("deepseek_v4", "mxfp4"),
    ("gpt_oss", "mxfp4"),
    ("kimi_k25", "int4_group"),
    ("llama4", "bf16"),
    ("minimax_m2", "fp8_block"),
    ("qwen3_next", "bf16"),
]


@pytest.mark.parametrize(("family", "format"), CASES)
def test_dense_tensors_only(tmp_path, monkeypatch, family, format):
    path = write_checkpoint(tmp_path, family, format)
    read = []

    class Recorder:
        def __init__(self, *args, **kwargs):
            self.file = safe_open(*args, **kwargs)

        def __enter__(self):
            self.opened = self.file.__enter__()
            return self

        def __exit__(self, *error):
            return self.file.__exit__(*error)

        def keys(self):
            return self.opened.keys()

        def get_tensor(self, name):
            read.append(name)
            return self.opened.get_tensor(name)

    monkeypatch.setattr(loader, "safe_open", Recorder)
    files = [str(file) for file in path.glob("*.safetensors")]
    names = [name for name, _ in loader.dense_tensors(path, files)]
    everything = set()
    for file in files:
        with safe_open(file, "pt") as tensors:
            everything |= set(tensors.keys())
    # Biases are parameters of vLLM's, though they are experts'.
    assert set(names) == {
        name for name in everything if ".experts." not in name or name.endswith("_bias")
    }
    assert read == names
    assert any(name.endswith("gate_up_proj_bias") for name in names) == (family == "gpt_oss")
    if family in ("deepseek_v3", "glm4_moe"):
        assert any(".shared_experts." in name for name in names)


def test_values_and_prefix(tmp_path):
    path = write_checkpoint(tmp_path, "qwen3_moe", shards=1)
    found = dict(loader.dense_tensors(path, [str(path / "model.safetensors")], "draft."))
    with safe_open(path / "model.safetensors", "pt") as tensors:
        assert torch.equal(found["draft.lm_head.weight"], tensors.get_tensor("lm_head.weight"))
    assert all(name.startswith("draft.") for name in found)


@pytest.mark.parametrize("moet", [True, False])
def test_only_a_model_served_with_moet_is_loaded_so(tmp_path, moet):
    path = write_checkpoint(tmp_path, "qwen3_moe")
    config = SimpleNamespace(model=str(path), revision=None, quantization="moet" if moet else "fp8")
    dense = loader.DenseLoader(LoadConfig())
    names = {name for name, _ in dense.get_all_weights(config, nn.Module())}
    assert any(".experts." in name for name in names) != moet
    assert "lm_head.weight" in names


def test_a_checkpoint_without_safetensors_is_refused(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    config = SimpleNamespace(model=str(tmp_path), revision=None, quantization="moet")
    with pytest.raises(CheckpointError, match="no safetensors files"):
        list(loader.DenseLoader(LoadConfig()).get_all_weights(config, nn.Module()))
