"""The model in transformers, in float32, with routed experts that the caller chooses."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from moet.checkpoints import Checkpoint, ExpertWeights
from moet.errors import CheckpointError

Experts = Callable[[int, int], ExpertWeights]
"""(layer, expert) → gate and up [intermediate, hidden], down [hidden, intermediate], float32."""


def load_reference(checkpoint: Checkpoint, experts: Experts) -> nn.Module:
    """A causal language model of `checkpoint`, float32 on the CPU, in eval mode.

    Dense tensors are the checkpoint's; routed experts are what `experts` gives. Draft layers are
    no part of transformers' models and are left out.

    Raises CheckpointError when a dense tensor is missing or of a form that is not BF16 or float.
    """
    # transformers must not see the quantization: the weights that it gets are already decoded. A
    # deep copy, since it writes into nested tables.
    settings = copy.deepcopy(dict(checkpoint.config))
    settings.pop("quantization_config", None)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    model: nn.Module = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="sdpa"
    )
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if ".mlp.experts." in name or (config.tie_word_embeddings and name == "lm_head.weight"):
                continue
            tensor.copy_(_dense(checkpoint, name))
    fill_experts(model, checkpoint, experts)
    return model.eval().requires_grad_(False)


@torch.no_grad()
def fill_experts(model: nn.Module, checkpoint: Checkpoint, experts: Experts) -> None:
    """Replaces the routed experts of a model that `load_reference` made."""
    geometry = checkpoint.geometry
    for layer in geometry.moe_layers:
        if layer in geometry.mtp_layers:
            continue
        fused = fused_experts(model, layer)
        for expert in range(geometry.num_experts):
            weights = experts(layer, expert)
            fused.gate_up_proj[expert] = torch.cat([weights.gate, weights.up])
            fused.down_proj[expert] = weights.down


def fused_experts(model: nn.Module, layer: int) -> Any:
    """The layer's `gate_up_proj` [E, 2 · intermediate, hidden] and `down_proj`, as a module."""
    return model.get_submodule(f"model.layers.{layer}.mlp.experts")


def relative_rms(reference: nn.Module, candidate: nn.Module) -> float:
    """‖candidate − reference‖ / ‖reference‖ over all routed experts of two such models."""
    error = norm = 0.0
    others = dict(candidate.named_parameters())
    for name, weight in reference.named_parameters():
        if ".mlp.experts." in name:
            error += float((others[name] - weight).double().square().sum())
            norm += float(weight.double().square().sum())
    return math.sqrt(error / norm)


def _dense(checkpoint: Checkpoint, name: str) -> Tensor:
    tensor = checkpoint.read_tensor(name)
    if tensor.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise CheckpointError(
            f"tensor {name!r} is {tensor.dtype}.", "Fidelity needs a checkpoint with dense BF16."
        )
    return tensor
