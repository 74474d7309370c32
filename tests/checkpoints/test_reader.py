"""The streaming reader on real files: stored bytes come back, bad checkpoints are refused."""

from __future__ import annotations

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moet.checkpoints import PROJECTIONS, Checkpoint
from moet.errors import CheckpointError
from tests.fixtures.checkpoints import write_checkpoint

FAMILIES = ["deepseek_v3", "qwen3_moe", "glm4_moe"]
PARTS = {
    "bf16": {"weight": "weight"},
    "fp8_block": {"weight": "weight", "scale_inv": "weight_scale_inv"},
    "nvfp4": {"codes": "weight", "scale": "weight_scale", "global_scale": "weight_scale_2"},
}
EXPERT = "model.layers.1.mlp.experts.3.up_proj"


def all_tensors(path: Path) -> dict[str, Tensor]:
    return {k: v for file in path.glob("*.safetensors") for k, v in load_file(file).items()}


def raw(tensor: Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def edit(path: Path, name: str, tensor: Tensor | None) -> str:
    """Replaces (or with None, removes) a tensor in its shard; returns the shard's name."""
    for file in path.glob("*.safetensors"):
        tensors = load_file(file)
        if name in tensors:
            tensors.pop(name)
            if tensor is not None:
                tensors[name] = tensor
            save_file(tensors, file, {"format": "pt"})
            return file.name
    raise AssertionError(name)


def refused(path: Path, *words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(path)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("format", PARTS)
def test_parts_are_the_stored_tensors(tmp_path, family, format, shards):
    write_checkpoint(tmp_path, family, format, shards=shards)
    stored = all_tensors(tmp_path)
    with Checkpoint.open(tmp_path) as checkpoint:
        geometry = checkpoint.geometry
        for layer in geometry.moe_layers:
            assert checkpoint.expert_format(layer) == format
            for expert in range(geometry.num_experts):
                source = checkpoint.read_expert(layer, expert)
                for projection in PROJECTIONS:
                    matrix = source[projection]
                    prefix = checkpoint.family.expert_prefix(
                        checkpoint.geometry, layer, expert, projection
                    )
                    assert matrix.parts.keys() == PARTS[format].keys()
                    for part, suffix in PARTS[format].items():
                        expected = stored[f"{prefix}.{suffix}"]
                        assert matrix.parts[part].dtype == expected.dtype
                        assert matrix.parts[part].shape == expected.shape
                        assert raw(matrix.parts[part]) == raw(expected)
        assert checkpoint.tensors.keys() == stored.keys()
        experts = [name for name in stored if checkpoint.is_expert_tensor(name)]
        assert len(experts) == sum(".mlp.experts." in name for name in stored)


def test_located_offsets_hold_the_bytes(tmp_path):
    write_checkpoint(tmp_path, format="nvfp4", shards=3)
    with Checkpoint.open(tmp_path) as checkpoint:
        source, located = checkpoint.read_expert(2, 5), checkpoint.locate(2, 5)
        total = 0
        for projection in PROJECTIONS:
            for part, ref in located[projection].items():
                data = (tmp_path / ref.file).read_bytes()[ref.offset : ref.offset + ref.nbytes]
                assert data == raw(source[projection].parts[part])
                total += ref.nbytes
        assert checkpoint.expert_bytes(2) == total


def test_draft_experts_may_be_bf16_in_an_nvfp4_checkpoint(tmp_path):
    write_checkpoint(tmp_path, format="nvfp4", mtp_format="bf16")
    with Checkpoint.open(tmp_path) as checkpoint:
        assert [checkpoint.expert_format(layer) for layer in (1, 2, 3)] == [
            "nvfp4",
            "nvfp4",
            "bf16",
        ]
        assert checkpoint.expert_bytes(3) == 3 * 128 * 64 * 2


def test_draft_layers_that_the_files_leave_out_are_not_counted(tmp_path):
    write_checkpoint(tmp_path, "glm4_moe", mtp=False)
    with Checkpoint.open(tmp_path) as checkpoint:
        assert checkpoint.config["num_nextn_predict_layers"] == 1
        assert checkpoint.geometry.moe_layers == (1, 2)
        assert checkpoint.geometry.mtp_layers == ()


def test_qwens_bf16_block_factors_are_widened(tmp_path):
    write_checkpoint(tmp_path, "qwen3_moe", "fp8_block")
    factor = torch.tensor([[0.0078125]])
    edit(tmp_path, f"{EXPERT}.weight_scale_inv", factor.bfloat16())
    with Checkpoint.open(tmp_path) as checkpoint:
        assert torch.equal(checkpoint.read_expert(1, 3).up.parts["scale_inv"], factor)


def test_global_scale_may_have_one_dimension(tmp_path):
    write_checkpoint(tmp_path, format="nvfp4")
    edit(tmp_path, f"{EXPERT}.weight_scale_2", torch.tensor([0.5]))
    with Checkpoint.open(tmp_path) as checkpoint:
        assert checkpoint.read_expert(1, 3).up.parts["global_scale"].shape == ()


def test_threads_read_what_one_thread_reads(tmp_path):
    write_checkpoint(tmp_path, format="fp8_block", experts=16)
    with Checkpoint.open(tmp_path) as checkpoint, ThreadPoolExecutor(8) as pool:
        keys = [(layer, expert) for layer in (1, 2, 3) for expert in range(16)] * 4

        def digest(key: tuple[int, int]) -> bytes:
            source = checkpoint.read_expert(*key)
            return b"".join(raw(t) for p in PROJECTIONS for t in source[p].parts.values())

        assert list(pool.map(digest, keys)) == [digest(key) for key in keys]


def test_files_are_closed(tmp_path):
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    write_checkpoint(tmp_path, shards=4)
    before = descriptors()
    with Checkpoint.open(tmp_path) as checkpoint:
        assert descriptors() == before + 4
    assert descriptors() == before
    with pytest.raises(CheckpointError, match="closed"):
        checkpoint.read_expert(1, 0)
    checkpoint = Checkpoint.open(tmp_path)
    del checkpoint  # never closed by hand
    assert descriptors() == before
    (tmp_path / "model-00003-of-00004.safetensors").write_bytes(b"")
    refused(tmp_path, "model-00003-of-00004.safetensors")
    assert descriptors() == before


def test_name_and_revision_from_the_hugging_face_cache(tmp_path):
    path = tmp_path / "models--nvidia--DeepSeek-R1-NVFP4" / "snapshots" / "0a1b2c"
    write_checkpoint(path)
    with Checkpoint.open(path) as checkpoint:
        assert (checkpoint.name, checkpoint.revision) == ("nvidia/DeepSeek-R1-NVFP4", "0a1b2c")
    plain = shutil.copytree(path, tmp_path / "mine")
    with Checkpoint.open(plain) as copy:
        assert (copy.name, copy.revision) == ("mine", None)
        assert copy.identity == checkpoint.identity


@pytest.mark.parametrize("format", PARTS)
def test_decoding_is_close_to_the_weights_that_were_written(tmp_path, format):
    """The writer's quantizers are not moet's: what decodes to the same weights was read right."""
    write_checkpoint(tmp_path / "exact", format="bf16")
    write_checkpoint(tmp_path / "quantized", format=format)
    exact = all_tensors(tmp_path / "exact")
    step = {"bf16": 0.0, "fp8_block": 2.0**-4, "nvfp4": 2.0**-2}[format]
    with Checkpoint.open(tmp_path / "quantized") as checkpoint:
        for projection, weight in checkpoint.decode_expert(2, 5)._asdict().items():
            expected = exact[f"model.layers.2.mlp.experts.5.{projection}_proj.weight"].float()
            assert weight.dtype == torch.float32
            assert (weight - expected).abs().max() <= step * expected.abs().max()
            assert (weight - expected).norm() <= step * expected.norm()


# Bad input: one clear error each.


@pytest.mark.parametrize(
    ("format", "suffix", "value"),
    [
        ("nvfp4", "weight_scale", "nan"),
        ("nvfp4", "weight_scale", "-1"),
        ("nvfp4", "weight_scale_2", "nan"),
        ("nvfp4", "weight_scale_2", "inf"),
        ("fp8_block", "weight_scale_inv", "inf"),
        ("fp8_block", "weight_scale_inv", "-1"),
        ("fp8_block", "weight", "nan"),
        ("bf16", "weight", "nan"),
    ],
)
def test_bad_number_names_tensor_and_file(tmp_path, format, suffix, value):
    write_checkpoint(tmp_path, format=format)
    name = f"{EXPERT}.{suffix}"
    tensor = all_tensors(tmp_path)[name].clone()
    tensor.view(-1)[-1] = float(value)
    shard = edit(tmp_path, name, tensor)
    with Checkpoint.open(tmp_path) as checkpoint:
        checkpoint.decode_expert(1, 2)
        with pytest.raises(CheckpointError) as caught:
            checkpoint.decode_expert(1, 3)
    assert name in str(caught.value)
    assert shard in str(caught.value)
    assert value in str(caught.value)


def test_no_directory(tmp_path):
    refused(tmp_path / "nowhere", "nowhere", "not a directory")


def test_no_config(tmp_path):
    refused(tmp_path, "config.json is missing")


def test_config_is_no_json(tmp_path):
    (tmp_path / "config.json").write_text("{")
    refused(tmp_path, "config.json", "not a JSON object")


def test_unknown_architecture(tmp_path):
    write_checkpoint(tmp_path, config={"architectures": ["GPT5ForCausalLM"]})
    refused(tmp_path, "GPT5ForCausalLM", "DeepseekV3ForCausalLM, DeepseekV4ForCausalLM")


def test_no_weights(tmp_path):
    write_checkpoint(tmp_path, shards=1)
    (tmp_path / "model.safetensors").unlink()
    refused(tmp_path, "neither model.safetensors nor")


def test_missing_shard(tmp_path):
    write_checkpoint(tmp_path, shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    refused(tmp_path, "model-00002-of-00003.safetensors is missing")


def test_truncated_shard(tmp_path):
    write_checkpoint(tmp_path)
    shard = tmp_path / "model-00002-of-00002.safetensors"
    os.truncate(shard, shard.stat().st_size - 1)
    refused(tmp_path, "model-00002-of-00002.safetensors is damaged")


def test_shard_cut_while_open(tmp_path):
    write_checkpoint(tmp_path, shards=1)
    with Checkpoint.open(tmp_path) as checkpoint:
        os.truncate(tmp_path / "model.safetensors", 100_000)
        with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor .* ends early"):
            checkpoint.read_expert(2, 7)


def test_tensor_in_the_index_but_not_in_its_shard(tmp_path):
    write_checkpoint(tmp_path)
    shard = edit(tmp_path, "model.norm.weight", None)
    refused(tmp_path, "model.norm.weight", shard, "not there")


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", "", "..", 3])
def test_index_that_leads_out_of_the_directory(tmp_path, file):
    write_checkpoint(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.norm.weight"] = file
    index.write_text(json.dumps(content))
    refused(tmp_path, "model.norm.weight", "no file name")


def test_index_without_a_map(tmp_path):
    write_checkpoint(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    refused(tmp_path, "index.json has no `weight_map`")


def test_missing_expert_tensor(tmp_path):
    write_checkpoint(tmp_path, format="nvfp4", shards=1)
    edit(tmp_path, f"{EXPERT}.weight_scale", None)
    refused(tmp_path, f"{EXPERT}.weight_scale", "missing")


@pytest.mark.parametrize("format", PARTS)
def test_wrong_dtype(tmp_path, format):
    write_checkpoint(tmp_path, format=format)
    shard = edit(tmp_path, f"{EXPERT}.weight", torch.zeros(64, 128))
    refused(tmp_path, shard, f"{EXPERT}.weight", "F32")


def test_wrong_shape(tmp_path):
    write_checkpoint(tmp_path)
    shard = edit(tmp_path, f"{EXPERT}.weight", torch.zeros(64, 64, dtype=torch.bfloat16))
    refused(tmp_path, shard, f"{EXPERT}.weight", "[64, 64]", "[64, 128]")


def test_quantized_experts_that_no_config_declares(tmp_path):
    write_checkpoint(tmp_path, format="fp8_block", config={"quantization_config": None})
    refused(tmp_path, "weight_scale_inv", "quantization declared")


def test_one_quantized_expert_among_bf16(tmp_path):
    write_checkpoint(tmp_path, format="nvfp4", mtp_format="bf16")
    edit(tmp_path, "model.layers.3.mlp.experts.5.up_proj.weight", torch.zeros(64, 64).byte())
    refused(tmp_path, "model.layers.3.mlp.experts.5.up_proj.weight", "U8", "BF16")


def test_more_experts_than_the_config_counts(tmp_path):
    write_checkpoint(tmp_path, config={"n_routed_experts": 4})
    refused(tmp_path, "experts.4.", "config.json does not count")


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "[64, 64]"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "ModelOpt's FP8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "group_size 32"),
        ([], "not a table"),
    ],
)
def test_unsupported_quantization(tmp_path, settings, word):
    write_checkpoint(tmp_path, config={"quantization_config": settings})
    refused(tmp_path, word)


def test_hf_quant_config_alone_is_enough(tmp_path):
    write_checkpoint(tmp_path, format="nvfp4", config={"quantization_config": None})
    with Checkpoint.open(tmp_path) as checkpoint:
        assert checkpoint.expert_format(1) == "nvfp4"


def test_two_declarations_that_differ(tmp_path):
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    write_checkpoint(tmp_path, format="nvfp4", config={"quantization_config": fp8})
    refused(tmp_path, "config.json declares fp8_block", "hf_quant_config.json nvfp4")
