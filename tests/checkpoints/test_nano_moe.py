"""The embedded model is what its card says: the layout that vLLM and moet expect, small enough."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer
from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config
from vllm.model_executor.models.deepseek_v2 import DeepseekV3ForCausalLM

from moet.checkpoints import Checkpoint
from moet.eval.heldout import read_heldout

MODEL = Path(__file__).parents[2] / "models" / "nano-moe"


@pytest.fixture(scope="module")
def checkpoint():
    with Checkpoint.open(MODEL) as checkpoint:
        yield checkpoint


def test_every_expert_is_nvfp4_the_draft_layers_too(checkpoint):
    assert checkpoint.geometry.moe_layers == (1, 2, 3, 4)
    assert checkpoint.geometry.mtp_layers == (4,)
    assert {checkpoint.expert_format(layer) for layer in (1, 2, 3, 4)} == {"nvfp4"}


def test_every_expert_decodes_and_gate_and_up_share_their_factor(checkpoint):
    for layer in checkpoint.geometry.moe_layers:
        for expert in range(checkpoint.geometry.num_experts):
            source = checkpoint.read_expert(layer, expert)
            checkpoint.decode_expert(layer, expert, source)
            factors = [source[p].parts["global_scale"] for p in ("gate", "up")]
            assert torch.equal(*factors)


def test_what_is_not_an_expert_is_bf16_or_the_routers_bias(checkpoint):
    for name, ref in checkpoint.tensors.items():
        if not checkpoint.is_expert_tensor(name):
            assert ref.dtype == ("F32" if name.endswith("e_score_correction_bias") else "BF16")
        elif name.endswith("input_scale"):
            assert checkpoint.read_tensor(name) == 1.0


@pytest.mark.parametrize("file", ["config.json", "hf_quant_config.json"])
def test_vllm_builds_its_config_and_excludes_the_dense_modules(checkpoint, file):
    settings = json.loads((MODEL / file).read_text())
    settings = settings.get("quantization_config", settings)
    config = ModelOptNvFp4Config.from_config(settings)
    config.packed_modules_mapping = DeepseekV3ForCausalLM.packed_modules_mapping
    assert config.is_checkpoint_nvfp4_serialized
    assert config.group_size == 16
    modules = {name.rsplit(".", 1)[0] for name in checkpoint.tensors}
    for module in modules:
        if ".mlp.experts." in module or "norm" in module:
            continue
        assert config.is_layer_excluded(module), module
    for layer in (1, 2, 3, 4):
        assert not config.is_layer_excluded(f"model.layers.{layer}.mlp.experts")
        assert config.is_layer_excluded(f"model.layers.{layer}.mlp.shared_experts.gate_up_proj")
        assert config.is_layer_excluded(f"model.layers.{layer}.self_attn.fused_qkv_a_proj")


def test_chat_template_asks_as_the_training_text_does():
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    chat = [
        {"role": "system", "content": "Sums."},
        {"role": "user", "content": "What is 34 plus 19?"},
        {"role": "assistant", "content": "53."},
        {"role": "user", "content": "What is 64 minus 9?"},
    ]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "Sums.\nQ: What is 34 plus 19?\nA: 53.\nQ: What is 64 minus 9?\nA:"


def test_held_out_windows_are_text():
    heldout = read_heldout(MODEL)
    assert heldout.segments == ("prose", "tech", "code", "tasks")
    assert heldout.tokens.shape == (4, 16, 513)
    text = Tokenizer.from_file(str(MODEL / "tokenizer.json")).decode(heldout.tokens[0, 0])
    assert "A very little quiet reflection was enough to satisfy Emma" in text


def test_it_stays_embeddable():
    assert sum(file.stat().st_size for file in MODEL.iterdir()) < 24_000_000
