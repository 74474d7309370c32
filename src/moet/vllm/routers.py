"""The routers of a model's layers, for guesses of what the next layer will use."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from moet.residency.cuda.kernels import Router
from moet.vllm.method import moet_layers

_SCORINGS = {"sigmoid": 1, "sqrtsoftplus": 2}  # as in guess.cu


def find_routers(model: nn.Module, vllm_config: Any) -> dict[int, Router]:
    """By layer, of those that moet computes, as far as their routers are of a known kind: a linear
    layer beside the experts, without a bias of its own. A guess needs neither groups of experts nor
    the weights that outputs get."""
    found: dict[int, Router] = {}
    for name, layer, method in moet_layers(vllm_config):
        weight = _gate(model, name, (layer.routed_experts.global_num_experts,))
        bias = getattr(layer.router, "e_score_correction_bias", None)
        scoring = 0 if bias is None else _SCORINGS.get(layer.router.scoring_func)
        if weight is not None and scoring is not None:
            found[method.layer] = Router(
                weight.detach().to(torch.bfloat16).contiguous(),
                None if bias is None else bias.detach().float().contiguous(),
                scoring,
            )
    return found


def _gate(model: nn.Module, name: str, experts: tuple[int]) -> Tensor | None:
    """The weights of the router beside these experts: [experts, hidden]."""
    try:
        around = model.get_submodule(name.rpartition(".")[0])
    except AttributeError:
        return None
    for child in around.children():
        weight = getattr(child, "weight", None)
        if isinstance(weight, Tensor) and weight.ndim == 2 and weight.shape[:1] == experts:
            plain = weight.dtype.is_floating_point and weight.element_size() > 1
            return weight if plain and getattr(child, "bias", None) is None else None
    return None
