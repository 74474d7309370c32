"""DeepSeek-V3 whose first layers with experts are routed by the token's id, as DeepSeek-V4's are.

vLLM's own DeepSeek-V4 needs what no test machine has. Its routing is in `FusedMoE`, though: here
layers of DeepSeek-V3 are made with it. Only vLLM's workers import this: it takes the place of
DeepSeek-V3 there (`worker_extension_cls`).
"""

from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from vllm import ModelRegistry
from vllm.model_executor.layers.fused_moe.router import cpu_router
from vllm.model_executor.models import deepseek_v2
from vllm.model_executor.models.deepseek_v2 import DeepseekV3ForCausalLM
from vllm.model_executor.models.utils import extract_layer_index

from tests.vllm.extension import ServingTestExtension
from tests.vllm.hash_table import hash_table

LAYERS = 2


class HashedDeepseek(DeepseekV3ForCausalLM):  # type: ignore[misc]
    """Runs without torch.compile only: the token ids reach the layers on a way of their own."""

    token_ids: torch.Tensor

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        config = vllm_config.model_config.hf_config
        made = deepseek_v2.FusedMoEFactory
        first = config.first_k_dense_replace

        def factory(**options: Any) -> Any:
            layer = extract_layer_index(options["prefix"])
            if first <= layer < first + LAYERS:
                options |= {
                    "use_grouped_topk": False,
                    "scoring_func": "sqrtsoftplus",
                    "e_score_correction_bias": None,
                    "hash_indices_table": hash_table(config, layer).to(torch.get_default_device()),
                }
            return made(**options)

        with patch.object(deepseek_v2, "FusedMoEFactory", factory):
            super().__init__(vllm_config=vllm_config, prefix=prefix)
        for layer in self.model.layers[first : first + LAYERS]:
            layer.mlp.forward = self._routed(layer.mlp)

    def forward(self, input_ids: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        self.token_ids = input_ids
        return super().forward(input_ids, *args, **options)

    def _routed(self, mlp: nn.Module) -> Any:
        def forward(hidden_states: torch.Tensor, *args: Any) -> torch.Tensor:
            return mlp.experts(
                hidden_states=hidden_states,
                router_logits=hidden_states,
                input_ids=self.token_ids,
            ).view_as(hidden_states)

        return forward


def hash_topk(
    logits: torch.Tensor,
    chosen: torch.Tensor,
    top_k: int,
    scoring: str,
    fused: int,
    experts: int,
    factor: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What vLLM's operator of this name computes, which has no form for 32 experts."""
    weights = torch.nn.functional.softplus(logits.float()).sqrt().gather(1, chosen.long())
    return factor * weights / weights.sum(-1, keepdim=True), chosen


class HashedTestExtension(ServingTestExtension):
    """Imported by the worker before it makes the model."""


cpu_router.hash_topk_cpu = hash_topk
ModelRegistry.register_model("DeepseekV3ForCausalLM", "tests.vllm.hashed:HashedDeepseek")
