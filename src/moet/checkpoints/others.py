"""MiniMax-M2, gpt-oss and Llama 4."""

from __future__ import annotations

from collections.abc import Mapping

from moet.checkpoints.base import Geometry, Projection
from moet.checkpoints.forms import BF16, FP8_BLOCK, GPT_OSS_BF16, GPT_OSS_MXFP4, LLAMA4_BF16
from moet.checkpoints.keys import (
    Config,
    integer,
    layer_list,
    make_geometry,
    nested_config,
    positive,
)
from moet.checkpoints.names import PerExpertNames, StackedNames


class MiniMaxM2(PerExpertNames):
    """MiniMax-M2: experts in every layer; `intermediate_size` is the expert's."""

    architectures = ("MiniMaxM2ForCausalLM",)
    forms = (BF16, FP8_BLOCK)
    block = "block_sparse_moe"
    matrices: Mapping[Projection, str] = {"gate": "w1", "up": "w3", "down": "w2"}

    def geometry(self, config: Config) -> Geometry:
        layers = integer(config, "num_hidden_layers")
        # Counted in config.json, absent from the published files.
        drafts = integer(config, "num_mtp_modules", minimum=0, default=0)
        return make_geometry(
            config,
            architecture=config["architectures"][0],
            experts=integer(config, "num_local_experts"),
            intermediate=integer(config, "intermediate_size"),
            moe_layers=range(layers + drafts),
        )


class GptOss(StackedNames):
    """gpt-oss: experts in every layer, with biases; stacks with gate and up rows interleaved.

    The activation is gate · sigmoid(1.702 · gate) · (up + 1), clamped at 7 (arXiv 2508.10925).
    """

    architectures = ("GptOssForCausalLM",)
    forms = (GPT_OSS_MXFP4, GPT_OSS_BF16)
    suffixes = ("", "blocks", "scales")

    def geometry(self, config: Config) -> Geometry:
        alpha = positive(config, "swiglu_alpha", default=1.702)
        assert alpha is not None
        return make_geometry(
            config,
            architecture=config["architectures"][0],
            experts=integer(config, "num_local_experts"),
            intermediate=integer(config, "intermediate_size"),
            moe_layers=range(integer(config, "num_hidden_layers")),
            swiglu_limit=positive(config, "swiglu_limit", default=7.0),
            swiglu_alpha=alpha,
            swiglu_beta=1.0,
            biases=True,
        )


class Llama4(StackedNames):
    """Llama 4: one expert a token, whose input the router's sigmoid scales; BF16 stacks."""

    architectures = ("Llama4ForConditionalGeneration",)
    forms = (LLAMA4_BF16,)
    layers = "language_model.model.layers."
    block = "feed_forward"

    def geometry(self, config: Config) -> Geometry:
        return self._geometry(nested_config(config), config["architectures"][0])

    def _geometry(self, text: Config, architecture: str) -> Geometry:
        step = integer(text, "interleave_moe_layer_step", default=1)
        layers = range(integer(text, "num_hidden_layers"))
        listed = layer_list(text, "moe_layers")
        return make_geometry(
            text,
            architecture=architecture,
            experts=integer(text, "num_local_experts"),
            intermediate=integer(text, "intermediate_size"),
            moe_layers=sorted(set(listed))
            if listed
            else [i for i in layers if (i + 1) % step == 0],
            router_weight_on_input=True,
        )


class Llama4Text(Llama4):
    """Llama 4's language model on its own."""

    architectures = ("Llama4ForCausalLM",)
    layers = "model.layers."

    def geometry(self, config: Config) -> Geometry:
        return self._geometry(config, config["architectures"][0])
