"""A checkpoint's twin for transformers: unquantized, float32, with experts that the test chooses.

Its tensors have the official names, so transformers' own conversion brings them into its models: a
second opinion on names, order of gate and up, and transposition.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from moet.checkpoints import Checkpoint, ExpertWeights
from tests.fixtures.encoders import stack_gpt_oss, stack_llama4

STACKS = {
    "GptOssForCausalLM": stack_gpt_oss,
    "Llama4ForCausalLM": stack_llama4,
    "Llama4ForConditionalGeneration": stack_llama4,
}


def load_plain(
    checkpoint: Checkpoint, path: Path, experts: Callable[[int, int], ExpertWeights]
) -> torch.nn.Module:
    """Writes the twin into `path` and loads it with transformers, in eval mode."""
    path.mkdir()
    config = json.loads((checkpoint.path / "config.json").read_text())
    for table in (config, config.get("text_config", {})):
        table.pop("quantization_config", None)
        table["torch_dtype"] = table["dtype"] = "float32"
        if table.get("model_type") == "kimi_k2":  # transformers knows it by this name only
            table["model_type"] = "deepseek_v3"
        if "rotary_dim" in table:  # MiniMax-M2's; transformers 5.17 passes over it
            table["partial_rotary_factor"] = table["rotary_dim"] / table["head_dim"]
    (path / "config.json").write_text(json.dumps(config))
    tensors = {
        name: _dense(checkpoint, name)
        for name in checkpoint.tensors
        if not checkpoint.is_expert_tensor(name) and not name.endswith(("scale_inv", ".scale"))
    }
    for layer in checkpoint.geometry.moe_layers:
        if layer not in checkpoint.geometry.mtp_layers:
            tensors |= _experts(checkpoint, layer, experts)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    multimodal = "text_config" in config
    auto = AutoModelForImageTextToText if multimodal else AutoModelForCausalLM
    model, info = auto.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"], sorted(info["missing_keys"])[:5]
    assert not info["mismatched_keys"]
    return model.eval().requires_grad_(False)


def _experts(
    checkpoint: Checkpoint, layer: int, experts: Callable[[int, int], ExpertWeights]
) -> dict[str, Tensor]:
    geometry, family = checkpoint.geometry, checkpoint.family
    weights = [experts(layer, expert) for expert in range(geometry.num_experts)]
    stack = STACKS.get(geometry.architecture)
    if stack is not None:
        prefix = family.expert_prefix(geometry, layer, 0, "down").removesuffix("down_proj")
        parts = stack([of._asdict() for of in weights], "bf16", dtype=torch.float32)
        return {f"{prefix}{name}": part.contiguous() for name, part in parts.items()}
    return {
        f"{family.expert_prefix(geometry, layer, expert, which)}.weight": weight.contiguous()
        for expert, of in enumerate(weights)
        for which, weight in of._asdict().items()
    }


def _dense(checkpoint: Checkpoint, name: str) -> Tensor:
    """A dense tensor in float32; FP8 ones times their blocks' factors."""
    tensor = checkpoint.read_tensor(name)
    if not tensor.is_floating_point():
        return tensor
    if tensor.dtype != torch.float8_e4m3fn:
        return tensor.float()
    scale = f"{name}_scale_inv"
    if scale not in checkpoint.tensors:
        scale = name.removesuffix("weight") + "scale"
    wide = checkpoint.read_tensor(scale).float()
    wide = wide.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return tensor.float() * wide[: tensor.shape[0], : tensor.shape[1]]
