"""`torch.ops.moet.experts`: the routed experts of a layer as one opaque operator.

vLLM's CPU platform lets torch.compile trace into a quantization method; an operator of our own is
what the tracer cannot look into. On a GPU it is one anyway.
"""

import functools

import torch
from torch.library import Library
from vllm.forward_context import get_forward_context
from vllm.utils.torch_utils import direct_register_custom_op

from moet.vllm.phase import fp4_tokens


def _experts(
    x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, layer_name: str
) -> torch.Tensor:
    context = get_forward_context()
    method = context.no_compile_layers[layer_name].routed_experts.quant_method
    out: torch.Tensor = method.compute(
        x, topk_weights, topk_ids, context.attn_metadata, fp4_tokens(context)
    )
    return out


def _experts_shape(
    x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, layer_name: str
) -> torch.Tensor:
    return torch.empty_like(x)


@functools.cache
def register_op() -> Library:
    """Registers the operator, once in a process; the cache keeps the library object alive."""
    library = Library("moet", "FRAGMENT")  # type: ignore[no-untyped-call]
    direct_register_custom_op("experts", _experts, fake_impl=_experts_shape, target_lib=library)
    return library
