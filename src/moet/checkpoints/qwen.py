"""Qwen3-MoE and Qwen3-Next."""

from __future__ import annotations

from moet.checkpoints.base import Geometry
from moet.checkpoints.forms import PER_EXPERT
from moet.checkpoints.keys import Config, integer, layer_list, make_geometry
from moet.checkpoints.names import PerExpertNames


class Qwen3Moe(PerExpertNames):
    """Qwen3-MoE: sparse every `decoder_sparse_step` layers, but for those in `mlp_only_layers`."""

    architectures = ("Qwen3MoeForCausalLM",)
    forms = PER_EXPERT

    def geometry(self, config: Config) -> Geometry:
        return self._geometry(config, drafts=0)

    def _geometry(self, config: Config, *, drafts: int) -> Geometry:
        step = integer(config, "decoder_sparse_step", minimum=1, default=1)
        dense = layer_list(config, "mlp_only_layers") or []
        layers = integer(config, "num_hidden_layers")
        sparse = [i for i in range(layers) if (i + 1) % step == 0 and i not in dense]
        return make_geometry(
            config,
            architecture=config["architectures"][0],
            experts=integer(config, "num_experts"),
            intermediate=integer(config, "moe_intermediate_size"),
            moe_layers=[*sparse, *range(layers, layers + drafts)],
        )


class Qwen3Next(Qwen3Moe):
    """Qwen3-Next: as Qwen3-MoE, with a draft layer `mtp.layers.0` that config.json does not count.

    The shared expert has a gate of its own, which vLLM computes with it.
    """

    architectures = ("Qwen3NextForCausalLM",)
    draft_layers = "mtp.layers."

    def geometry(self, config: Config) -> Geometry:
        drafts = integer(config, "num_nextn_predict_layers", minimum=0, default=1)
        return self._geometry(config, drafts=drafts)
