"""Reading config.json: every key checked before a geometry is made of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moet.checkpoints.base import Geometry
from moet.errors import CheckpointError

Config = Mapping[str, Any]

_AS_PUBLISHED = (
    "Use the config.json that the model was published with; if it is that one, moet does not know "
    "this form of the model yet."
)
_ALONE = "Serve this model with vLLM alone."


def integer(config: Config, key: str, *, minimum: int = 1, default: int | None = None) -> int:
    """An integer key; raises CheckpointError when it is missing or impossible."""
    value = config.get(key, default)
    if value is None:
        raise CheckpointError(f"config.json: `{key}` is missing.", _AS_PUBLISHED)
    # The upper bound keeps a hostile config from making lists of billions of layers.
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= 2**20:
        raise CheckpointError(
            f"config.json: `{key}` is {value!r}; an integer ≥ {minimum} is meant.", _AS_PUBLISHED
        )
    return value


def positive(config: Config, key: str, *, default: float | None) -> float | None:
    """A number > 0; `default` where the key is absent or null."""
    value = config.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
        raise CheckpointError(
            f"config.json: `{key}` is {value!r}; a number > 0 is meant.", _AS_PUBLISHED
        )
    return float(value)


def layer_list(config: Config, key: str) -> list[int] | None:
    """A list of layers; None where the key is absent or null."""
    value = config.get(key)
    if value is None:
        return None
    if not isinstance(value, list) or not all(type(layer) is int for layer in value):
        raise CheckpointError(f"config.json: `{key}` must be a list of layers.", _AS_PUBLISHED)
    return value


def nested_config(config: Config) -> Config:
    """The language model's part of the config of a model that nests it.

    Raises CheckpointError where there is none.
    """
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise CheckpointError("config.json: `text_config` is missing.", _AS_PUBLISHED)
    return text


def make_geometry(
    config: Config,
    *,
    architecture: str,
    experts: int,
    intermediate: int,
    moe_layers: Sequence[int],
    swiglu_limit: float | None = None,
    swiglu_alpha: float = 1.0,
    swiglu_beta: float = 0.0,
    biases: bool = False,
    router_weight_on_input: bool = False,
) -> Geometry:
    """The geometry, from the keys that all families share; draft layers follow the last layer.

    Raises CheckpointError for a missing or impossible key.
    """
    layers = integer(config, "num_hidden_layers")
    top_k = integer(config, "num_experts_per_tok")
    if top_k > experts:
        raise CheckpointError(
            f"config.json: `num_experts_per_tok` is {top_k}, but there are {experts} experts.",
            _AS_PUBLISHED,
        )
    if not any(layer < layers for layer in moe_layers):
        raise CheckpointError("config.json: no layer of this model has routed experts.", _ALONE)
    if config.get("hidden_act", "silu") != "silu":
        raise CheckpointError(
            f"config.json: `hidden_act` is {config['hidden_act']!r}; experts must be SwiGLU "
            "(silu).",
            _ALONE,
        )
    return Geometry(
        architecture=architecture,
        hidden=integer(config, "hidden_size"),
        intermediate=intermediate,
        num_experts=experts,
        top_k=top_k,
        num_layers=layers,
        moe_layers=tuple(moe_layers),
        mtp_layers=tuple(layer for layer in moe_layers if layer >= layers),
        swiglu_limit=swiglu_limit,
        swiglu_alpha=swiglu_alpha,
        swiglu_beta=swiglu_beta,
        biases=biases,
        router_weight_on_input=router_weight_on_input,
    )
