"""The model families that moet serves, keyed by config.json's `architectures[0]`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

from moet.checkpoints.base import FAMILIES, ExpertTensor, Family, Geometry, Projection
from moet.errors import CheckpointError

Config = Mapping[str, Any]

_NUMBER = r"(0|[1-9]\d*)"
_EXPERT = re.compile(
    rf"model\.layers\.{_NUMBER}\.mlp\.experts\.{_NUMBER}\.(gate|up|down)_proj\.(\w+)"
)


def family_of(config: Config) -> Family:
    """The family that answers for a config.json.

    Raises CheckpointError for an architecture that no family knows.
    """
    architectures = config.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    if not isinstance(name, str) or name not in FAMILIES:
        raise CheckpointError(
            f"config.json: the architecture {name!r} is not supported.",
            f"Supported: {', '.join(sorted(FAMILIES))}.",
        )
    return FAMILIES[name]


class _MlpExperts(Family):
    """The names that many families share: `model.layers.L.mlp.experts.E.gate_proj.…`."""

    def expert_prefix(self, layer: int, expert: int, projection: Projection) -> str:
        return f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj"

    def parse_expert(self, name: str) -> ExpertTensor | None:
        match = _EXPERT.fullmatch(name)
        if match is None:
            return None
        layer, expert, projection, suffix = match.groups()
        return ExpertTensor(int(layer), int(expert), cast(Projection, projection), suffix)


class DeepseekV3(_MlpExperts):
    """DeepSeek-V3 and R1 (arXiv 2412.19437): leading dense layers, draft layers after the last."""

    architectures = ("DeepseekV3ForCausalLM",)

    def geometry(self, config: Config) -> Geometry:
        first = _integer(config, "first_k_dense_replace", minimum=0, default=0)
        every = _integer(config, "moe_layer_freq", minimum=1, default=1)
        drafts = _integer(config, "num_nextn_predict_layers", minimum=0, default=0)
        layers = _integer(config, "num_hidden_layers")
        return _geometry(
            config,
            experts=_integer(config, "n_routed_experts"),
            moe_layers=[i for i in range(first, layers + drafts) if i % every == 0],
        )


class Glm4Moe(DeepseekV3):
    """GLM-4.5 and 4.6: DeepSeek-V3's arrangement of layers, without `moe_layer_freq`."""

    architectures = ("Glm4MoeForCausalLM",)


class Qwen3Moe(_MlpExperts):
    """Qwen3-MoE: sparse every `decoder_sparse_step` layers, but for those in `mlp_only_layers`."""

    architectures = ("Qwen3MoeForCausalLM",)

    def geometry(self, config: Config) -> Geometry:
        step = _integer(config, "decoder_sparse_step", minimum=1, default=1)
        dense = config.get("mlp_only_layers") or []
        if not isinstance(dense, list):
            raise CheckpointError("config.json: `mlp_only_layers` must be a list of layers.")
        layers = range(_integer(config, "num_hidden_layers"))
        return _geometry(
            config,
            experts=_integer(config, "num_experts"),
            moe_layers=[i for i in layers if (i + 1) % step == 0 and i not in dense],
        )


def _geometry(config: Config, *, experts: int, moe_layers: list[int]) -> Geometry:
    layers = _integer(config, "num_hidden_layers")
    top_k = _integer(config, "num_experts_per_tok")
    if top_k > experts:
        raise CheckpointError(
            f"config.json: `num_experts_per_tok` is {top_k}, but there are {experts} experts."
        )
    if not any(layer < layers for layer in moe_layers):
        raise CheckpointError("config.json: no layer of this model has routed experts.")
    if config.get("hidden_act", "silu") != "silu":
        raise CheckpointError(
            f"config.json: `hidden_act` is {config['hidden_act']!r}; experts must be SwiGLU (silu)."
        )
    return Geometry(
        architecture=config["architectures"][0],
        hidden=_integer(config, "hidden_size"),
        intermediate=_integer(config, "moe_intermediate_size"),
        num_experts=experts,
        top_k=top_k,
        num_layers=layers,
        moe_layers=tuple(moe_layers),
        mtp_layers=tuple(layer for layer in moe_layers if layer >= layers),
        swiglu_limit=None,
    )


def _integer(config: Config, key: str, *, minimum: int = 1, default: int | None = None) -> int:
    value = config.get(key, default)
    if value is None:
        raise CheckpointError(f"config.json: `{key}` is missing.")
    # The upper bound keeps a hostile config from making lists of billions of layers.
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= 2**20:
        raise CheckpointError(
            f"config.json: `{key}` is {value!r}; an integer ≥ {minimum} is meant."
        )
    return value


for _family in (DeepseekV3(), Glm4Moe(), Qwen3Moe()):
    for _architecture in _family.architectures:
        FAMILIES.register(_architecture)(_family)
