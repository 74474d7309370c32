"""What a vLLM layer asks of its routed experts besides matrices; what moet cannot is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.models.utils import extract_layer_index

from moet.checkpoints.base import Geometry
from moet.errors import UnsupportedError
from moet.kernels.base import GPT_OSS, ExpertsOperator, SwiGLU

if TYPE_CHECKING:
    from moet.kernels.cuda.experts import CudaExperts

_WITHOUT = "moet's kernels do not compute that: serve this model without --quantization moet."


@dataclass(frozen=True)
class Biases:
    """This rank's biases of a layer's experts.

    gate_up: float32 [experts, 2, intermediate of the rank]. down: float32 [experts, hidden]; zero
    on all ranks but the first, since the ranks' outputs are summed.
    """

    gate_up: Tensor
    down: Tensor

    def add_down(self, ids: Tensor, weights: Tensor, out: Tensor) -> None:
        """out[t] += Σ over k of weight · bias of the expert; ids −1 are skipped."""
        weights = weights.masked_fill(ids < 0, 0.0)
        for expert, weight in zip(ids.clamp(min=0).long().T, weights.T, strict=True):
            out += weight[:, None] * self.down[expert]


def layer_index(prefix: str, hidden_layers: int) -> int:
    """The layer that a module's name stands for; `mtp.layers.0` follows the last (Qwen3-Next)."""
    index: int = extract_layer_index(prefix)
    return index + hidden_layers if prefix.startswith("mtp.") else index


def activation_of(layer: Any, prefix: str) -> SwiGLU:
    """The layer's activation; raises UnsupportedError for one that is no SwiGLU."""
    match layer.activation:
        case MoEActivation.SILU:
            alpha, beta = layer.swiglu_alpha, layer.swiglu_beta
            return SwiGLU(
                layer.swiglu_limit, 1.0 if alpha is None else alpha, 0.0 if beta is None else beta
            )
        case MoEActivation.SWIGLUOAI:
            # vLLM's operator takes no others (`csrc/activation_kernels.cu`, `swigluoai_and_mul`).
            return GPT_OSS
        case other:
            raise UnsupportedError(
                f"{prefix}: the activation {other.value!r}, not SwiGLU.", _WITHOUT
            )


def check_layer(layer: Any, prefix: str) -> None:
    """Refuses what no operator computes."""
    moe = layer.moe_config
    if layer.apply_router_weight_on_input and moe.experts_per_token != 1:
        raise UnsupportedError(
            f"{prefix}: router weights on the input of {moe.experts_per_token} experts a token.",
            _WITHOUT,
        )
    if moe.has_bias and layer.activation is not MoEActivation.SWIGLUOAI:
        raise UnsupportedError(
            f"{prefix}: experts with biases, not interleaved as gpt-oss's are.", _WITHOUT
        )
    if moe.num_experts != moe.num_logical_experts:
        raise UnsupportedError(f"{prefix}: shared experts fused with the routed ones.", _WITHOUT)


def check_computation(
    layer: Any,
    prefix: str,
    activation: SwiGLU,
    geometry: Geometry,
    operator: ExpertsOperator | CudaExperts,
) -> None:
    """Raises UnsupportedError unless vLLM computes as config.json says, and the operator can."""
    stated = SwiGLU(geometry.swiglu_limit, geometry.swiglu_alpha, geometry.swiglu_beta)
    ours = activation, bool(layer.moe_config.has_bias), bool(layer.apply_router_weight_on_input)
    if ours != (stated, geometry.biases, geometry.router_weight_on_input):
        raise UnsupportedError(
            f"{prefix}: this vLLM computes {ours[0]} (biases: {ours[1]}, router weights on the "
            f"input: {ours[2]}), config.json describes {stated} (biases: {geometry.biases}, on the "
            f"input: {geometry.router_weight_on_input}).",
            "Serve it with the vLLM versions that moet was tested with.",
        )
    if not operator.any_swiglu and (geometry.biases or stated != SwiGLU(geometry.swiglu_limit)):
        raise UnsupportedError(
            f"{prefix}: the operator {operator.name!r} has no biases and not gpt-oss's activation.",
            "Serve this model with vLLM's CPU build.",
        )


def register_biases(layer: Any, experts: int, intermediate: int, hidden: int) -> None:
    """Parameters for the biases, which vLLM's loader fills; gate and up alternate."""
    for name, width in (("w13_bias", 2 * intermediate), ("w2_bias", hidden)):
        parameter: Any = nn.Parameter(torch.zeros(experts, width), requires_grad=False)
        parameter.weight_loader = _load
        layer.register_parameter(name, parameter)


def biases_of(layer: Any) -> Biases | None:
    """What was loaded; None for a layer without biases."""
    if not layer.moe_config.has_bias:
        return None
    both = layer.w13_bias.data.float()
    gate_up = torch.stack([both[:, 0::2], both[:, 1::2]], 1).contiguous()
    return Biases(gate_up, layer.w2_bias.data.float())


def _load(param: nn.Parameter, loaded_weight: Tensor, *args: Any, **kwargs: Any) -> None:
    """The loader has cut the rank's part already."""
    param.data.copy_(loaded_weight)
