"""What a `RoutedExperts` layer of vLLM asks of us: no weights, and the layer's output."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

from moet.errors import MoetError, UnsupportedError
from moet.vllm.ahead import hash_tables
from moet.vllm.build import build_runtime
from moet.vllm.construction import ends_failed_steps
from moet.vllm.layer import (
    Biases,
    activation_of,
    biases_of,
    check_computation,
    check_layer,
    layer_index,
    register_biases,
)
from moet.vllm.op import register_op
from moet.vllm.phase import Fp4Tokens
from moet.vllm.rank import RankExperts

# The part tensors of the checkpoint formats that vLLM reads, as it names them on the layer.
_PARTS = (
    "weight",
    "weight_scale",
    "weight_scale_2",
    "weight_scale_inv",
    "weight_packed",
    "weight_shape",
    "weight_global_scale",
    "input_scale",
    "input_global_scale",
)


class MoetMoEMethod(FusedMoEMethodBase):  # type: ignore[misc]
    """The routed experts of one layer, computed from the rows that residency holds.

    vLLM's runner routes, runs the shared experts, and sums over tensor-parallel ranks; `apply`
    returns this rank's part of the routed experts only.
    """

    def __init__(self, layer: Any, prefix: str) -> None:
        super().__init__(layer.moe_config)
        check_layer(layer, prefix)
        self._runtime: RankExperts | None = None
        self._biases: Biases | None = None
        self._failure: MoetError | None = None
        self._vllm_config = get_current_vllm_config()
        hidden_layers = self._vllm_config.model_config.hf_text_config.num_hidden_layers
        self._prefix, self.layer = prefix, layer_index(prefix, hidden_layers)
        self._activation = activation_of(layer, prefix)
        self._weight_on_input: bool = layer.apply_router_weight_on_input
        register_op()

    @property
    def runtime(self) -> RankExperts | None:
        """The rank's; None before the weights are processed. A new one is given the biases."""
        return self._runtime

    @runtime.setter
    def runtime(self, runtime: RankExperts | None) -> None:
        self._runtime = runtime
        if runtime is not None and self._biases is not None:
            runtime.biases[self.layer] = self._biases

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size: int, act_dtype: torch.dtype, parallel: Any
    ) -> tuple[int, int]:
        return hidden_size, intermediate_size

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        """Registers empty parameters: the loader passes experts over, so a tensor that arrives in
        one of these is refused with its name, where vLLM would end in a KeyError."""
        for shard in ("w13", "w2"):
            for part in _PARTS:
                parameter: Any = nn.Parameter(torch.empty(0), requires_grad=False)
                parameter.weight_loader = _refuse
                layer.register_parameter(f"{shard}_{part}", parameter)
        if self.moe.has_bias:
            register_biases(
                layer,
                layer.global_num_experts,
                layer.intermediate_size_per_partition,
                layer.hidden_size,
            )

    def process_weights_after_loading(self, layer: Any) -> None:
        # Set here, or vLLM asks for it again in every forward, inside the compiled region.
        self.moe_quant_config = FusedMoEQuantConfig.make()
        runtime = find_runtime(self._vllm_config)
        if runtime is None:
            layers = [method.layer for method in moet_methods(self._vllm_config)]
            runtime = build_runtime(self._vllm_config, layers, self.moe.tp_rank, self.moe.tp_size)
            if tables := hash_tables(self._vllm_config):
                runtime.foresee(tables)
        runtime.check_layer(
            self.layer,
            layer.global_num_experts,
            layer.hidden_size,
            layer.intermediate_size_per_partition * self.moe.tp_size,
        )
        check_computation(layer, self._prefix, self._activation, runtime.geometry, runtime.operator)
        self._biases = biases_of(layer)
        self.runtime = runtime

    def get_fused_moe_quant_config(self, layer: Any) -> FusedMoEQuantConfig:
        return FusedMoEQuantConfig.make()

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any = None,
        shared_experts_input: Tensor | None = None,
    ) -> Tensor:
        out: Tensor = torch.ops.moet.experts(x, topk_weights, topk_ids, layer.layer_name)
        return out

    def compute(
        self,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        attn_metadata: Any,
        fp4: Fp4Tokens | None = None,
    ) -> Tensor:
        """The body of `torch.ops.moet.experts`.

        x: [T, hidden]. topk_weights: float32 [T, k]. topk_ids: int32 [T, k], −1 for padding.
        Returns this rank's partial sum, [T, hidden] in x's dtype.
        """
        assert self.runtime is not None, "no weights were processed"
        if self._weight_on_input:  # of one expert a token
            x, topk_weights = x * topk_weights.to(x.dtype), torch.ones_like(topk_weights)
        try:
            return self.runtime.experts(
                self.layer, x, topk_ids, topk_weights, attn_metadata, self._activation, fp4
            )
        except MoetError as error:
            if not ends_failed_steps(self._vllm_config):
                raise
            # The step's requests end with an error when its output is there (`ChecksSteps`).
            self._failure = self._failure or error
            return torch.zeros_like(x)

    def take_failure(self) -> MoetError | None:
        """Why the step that runs, or has just ended, fails; asked once a step."""
        failure, self._failure = self._failure, None
        return failure


def moet_layers(vllm_config: Any) -> Iterator[tuple[Any, MoetMoEMethod]]:
    """All layers with routed experts that vLLM has made in this process, and their methods."""
    for layer in vllm_config.compilation_config.static_forward_context.values():
        method = getattr(getattr(layer, "routed_experts", None), "quant_method", None)
        if isinstance(method, MoetMoEMethod):
            yield layer, method


def moet_methods(vllm_config: Any) -> list[MoetMoEMethod]:
    """The methods of these layers."""
    return [method for _, method in moet_layers(vllm_config)]


def find_runtime(vllm_config: Any) -> RankExperts | None:
    """The process's runtime, once the first layer has made it."""
    runtimes = (method.runtime for _, method in moet_layers(vllm_config))
    return next((runtime for runtime in runtimes if runtime is not None), None)


def _refuse(
    param: nn.Parameter, loaded_weight: Tensor, weight_name: str = "", *args: Any, **kwargs: Any
) -> None:
    raise UnsupportedError(
        f"the loader handed over a routed expert's tensor for {weight_name}; moet takes the "
        "experts from the pack.",
        "Start without --load-format, and without a draft_load_config in --speculative-config.",
    )


_refuse.supports_moe_loading = True  # type: ignore[attr-defined]
