"""The loader: every dense tensor, no expert tensor, and no byte of one read."""

import pytest
import torch
from safetensors import safe_open

from moet.vllm import loader
from tests.fixtures.checkpoints import write_checkpoint


@pytest.mark.parametrize("format", ["bf16", "fp8_block", "nvfp4"])
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe", "glm4_moe"])
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
    assert set(names) == {name for name in everything if ".experts." not in name}
    assert read == names
    assert any(".shared_experts." in name for name in names) == (family != "qwen3_moe")


def test_values_and_prefix(tmp_path):
    path = write_checkpoint(tmp_path, "qwen3_moe", shards=1)
    found = dict(loader.dense_tensors(path, [str(path / "model.safetensors")], "draft."))
    with safe_open(path / "model.safetensors", "pt") as tensors:
        assert torch.equal(found["draft.lm_head.weight"], tensors.get_tensor("lm_head.weight"))
    assert all(name.startswith("draft.") for name in found)
