"""Hash-routed layers: their experts follow from the token ids, so that their rows can be read from
the start of a pass on, before the first of these layers asks for any."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.forward_context import get_forward_context

from moet.vllm.phase import fp4_tokens


class LooksAhead:
    """Before one of vLLM's worker classes among the bases."""

    vllm_config: Any
    model_runner: Any

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        if hash_tables(self.vllm_config):
            look_ahead(self.model_runner.get_model(), self.vllm_config)


def hash_tables(vllm_config: Any) -> dict[int, Tensor]:
    """By layer, the experts of each token's id: int [vocabulary, top-k]. Of the layers that moet
    computes and vLLM routes by such a table (DeepSeek-V4's first ones)."""
    from moet.vllm.method import moet_layers  # imports numba: see config.py

    tables: dict[int, Tensor] = {}
    for layer, method in moet_layers(vllm_config):
        table = getattr(getattr(layer, "router", None), "_hash_indices_table", None)
        if table is not None:
            tables[method.layer] = table.detach()
    return tables


def look_ahead(model: nn.Module, vllm_config: Any) -> None:
    """Has the rank's runtime told the token ids of each pass of the target model that follows.

    A hook of the module that vLLM's runners call: outside of what torch.compile sees, inside of
    what a full CUDA graph captures, launched before a piecewise one's parts. Passes some of whose
    tokens run at FP4 are left alone, and vLLM's warm-up passes, which have no requests.
    """
    from moet.vllm.method import find_runtime

    def tell(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        token_ids = kwargs.get("input_ids", args[0] if args else None)
        runtime, context = find_runtime(vllm_config), get_forward_context()
        if token_ids is None or runtime is None or fp4_tokens(context) is not None:
            return
        if context.attn_metadata is None and not _capturing(token_ids):
            return
        runtime.prefetch(token_ids)

    model.register_forward_pre_hook(tell, with_kwargs=True)


def _capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
