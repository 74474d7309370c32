"""Quantizations as the configs declare them; what no family has is refused by name."""

from __future__ import annotations

import copy
import json

import pytest

from moet.checkpoints import Checkpoint
from moet.checkpoints.declared import declared_format
from moet.errors import CheckpointError
from tests.fixtures.checkpoints import write_checkpoint
from tests.fixtures.quantization import modelopt_config, quantization_config

INT4 = quantization_config("kimi_k2", "int4_group", False)


def int4(**weights):
    changed = copy.deepcopy(INT4)
    changed["config_groups"]["group_0"]["weights"] |= weights
    return {"quantization_config": changed}


def test_int4_in_groups_of_32():
    assert declared_format(int4(), None) == "int4_group"
    per_group = copy.deepcopy(INT4)
    per_group["config_groups"]["group_0"]["format"] = per_group.pop("format")
    assert declared_format({"quantization_config": per_group}, None) == "int4_group"


@pytest.mark.parametrize(
    ("weights", "word"),
    [
        ({"num_bits": 8}, "num_bits 8"),
        ({"type": "float"}, "type float"),
        ({"group_size": 128}, "group_size 128"),
        ({"strategy": "channel"}, "strategy channel"),
        ({"symmetric": False}, "symmetric False"),
    ],
)
def test_other_compressed_tensors_are_refused(weights, word):
    with pytest.raises(CheckpointError, match=word):
        declared_format(int4(**weights), None)


def test_two_groups_of_compressed_tensors_are_refused():
    """The experts could be in either."""
    two = copy.deepcopy(INT4)
    two["config_groups"]["group_1"] = two["config_groups"]["group_0"]
    with pytest.raises(CheckpointError, match=r"2 group\(s\)"):
        declared_format({"quantization_config": two}, None)
    with pytest.raises(CheckpointError, match=r"'float-quantized'"):
        declared_format({"quantization_config": INT4 | {"format": "float-quantized"}}, None)


def test_a_text_config_may_declare_it():
    assert declared_format({"text_config": int4()}, None) == "int4_group"
    with pytest.raises(CheckpointError, match="text_config declares int4_group and hf_quant"):
        declared_format({"text_config": int4()}, modelopt_config())


@pytest.mark.parametrize(
    ("family", "format", "declared", "words"),
    [
        ("llama4", "bf16", "fp8_block", "Llama4ForConditionalGeneration with fp8_block"),
        ("gpt_oss", "mxfp4", "nvfp4", "GptOssForCausalLM with nvfp4"),
        ("qwen3_moe", "bf16", "mxfp4", "Qwen3MoeForCausalLM with mxfp4"),
        ("minimax_m2", "fp8_block", "int4_group", "MiniMaxM2ForCausalLM with int4_group"),
    ],
)
def test_forms_that_a_family_does_not_have(tmp_path, family, format, declared, words):
    config = {"quantization_config": quantization_config(family, declared, False)}
    write_checkpoint(tmp_path, family, format, layers=2, config=config)
    with pytest.raises(CheckpointError, match=words):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"expert_dtype": "int4"}, "`expert_dtype` 'int4'"),
        ({"expert_dtype": "fp8"}, "is I8 .*; fp8_block"),  # the tensors are FP4
        ({"quantization_config": {"quant_method": "quark"}}, "unknown form"),
        ({"num_nextn_predict_layers": 0}, "config.json does not count"),
    ],
)
def test_deepseek_v4_of_another_kind(tmp_path, change, words):
    write_checkpoint(tmp_path, "deepseek_v4", "mxfp4", layers=2, config=change)
    with pytest.raises(CheckpointError, match=words):
        Checkpoint.open(tmp_path)


def test_a_stack_of_another_width_is_refused(tmp_path):
    write_checkpoint(tmp_path, "gpt_oss", "mxfp4", layers=1)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 32}))
    with pytest.raises(CheckpointError, match=r"gate_up_proj_blocks' is U8 \[8, 128, 4, 16\]"):
        Checkpoint.open(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_local_experts": 9}))
    with pytest.raises(CheckpointError, match=r"mxfp4 experts have U8 \[9, 128, 4, 16\]"):
        Checkpoint.open(tmp_path)
