"""DeepSeek-V3, R1, V3.2 and V4, and the Kimi-K2 models of the same form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moet.checkpoints.base import Geometry, Projection
from moet.checkpoints.forms import BF16, DEEPSEEK_V4_FP4, DEEPSEEK_V4_FP8, NVFP4, PER_EXPERT
from moet.checkpoints.keys import Config, integer, make_geometry, nested_config, positive
from moet.checkpoints.names import PerExpertNames
from moet.errors import CheckpointError


class DeepseekV3(PerExpertNames):
    """DeepSeek-V3, R1 (arXiv 2412.19437) and V3.2, Kimi-K2, GLM-4.5 to 5.2.

    Leading dense layers, draft layers numbered after the last.
    """

    architectures: tuple[str, ...] = (
        "DeepseekV3ForCausalLM",
        "DeepseekV32ForCausalLM",
        "Glm4MoeForCausalLM",
        "GlmMoeDsaForCausalLM",
    )
    forms = PER_EXPERT

    def geometry(self, config: Config) -> Geometry:
        return self._geometry(config, config["architectures"][0])

    def _geometry(self, config: Config, architecture: str) -> Geometry:
        first = integer(config, "first_k_dense_replace", minimum=0, default=0)
        every = integer(config, "moe_layer_freq", minimum=1, default=1)
        drafts = integer(config, "num_nextn_predict_layers", minimum=0, default=0)
        layers = integer(config, "num_hidden_layers")
        return make_geometry(
            config,
            architecture=architecture,
            experts=integer(config, "n_routed_experts"),
            intermediate=integer(config, "moe_intermediate_size"),
            moe_layers=[i for i in range(first, layers + drafts) if i % every == 0],
        )


class KimiK25(DeepseekV3):
    """Kimi-K2.5 and later: DeepSeek-V3's language model beside a vision tower."""

    architectures = ("KimiK25ForConditionalGeneration",)
    layers = "language_model.model.layers."

    def geometry(self, config: Config) -> Geometry:
        return self._geometry(nested_config(config), config["architectures"][0])


class DeepseekV4(PerExpertNames):
    """DeepSeek-V4: experts in every layer, the first ones routed by token id, SwiGLU clamped.

    The experts are FP4 or, by `expert_dtype`, FP8, whatever the dense layers are. Draft layers are
    `mtp.0` …: one, or the three of a DSpark drafter.
    """

    architectures = ("DeepseekV4ForCausalLM",)
    forms = (BF16, DEEPSEEK_V4_FP4, DEEPSEEK_V4_FP8, NVFP4)
    layers = "layers."
    draft_layers = "mtp."
    block = "ffn"
    matrices: Mapping[Projection, str] = {"gate": "w1", "up": "w3", "down": "w2"}

    def geometry(self, config: Config) -> Geometry:
        layers = integer(config, "num_hidden_layers")
        drafts = integer(config, "num_nextn_predict_layers", minimum=0, default=1)
        if config.get("dspark_target_layer_ids") is not None:
            drafts = integer(config, "n_mtp_layers", default=3)
        return make_geometry(
            config,
            architecture=config["architectures"][0],
            experts=integer(config, "n_routed_experts"),
            intermediate=integer(config, "moe_intermediate_size"),
            moe_layers=range(layers + drafts),
            swiglu_limit=positive(config, "swiglu_limit", default=None),
        )

    def declared_format(self, config: Config, modelopt: Mapping[str, Any] | None) -> str:
        settings = config.get("quantization_config")
        if settings is None:
            return super().declared_format(config, modelopt)
        if not isinstance(settings, Mapping) or settings.get("quant_method") != "fp8":
            raise CheckpointError(
                "config.json: the experts of this DeepSeek-V4 checkpoint are in an unknown form.",
                'Supported: `quantization_config.quant_method` "fp8", as DeepSeek publishes it.',
            )
        algorithm = settings.get("moe_quant_algo")
        dtype = config.get("expert_dtype", "fp4")
        formats = {("fp4", None): "mxfp4", ("fp4", "NVFP4"): "nvfp4", ("fp8", None): "fp8_block"}
        if (dtype, algorithm) not in formats:
            raise CheckpointError(
                f"config.json: experts with `expert_dtype` {dtype!r} and `moe_quant_algo` "
                f"{algorithm!r} are not supported.",
                'Supported: "fp4" (MXFP4 or NVFP4) and "fp8".',
            )
        return formats[dtype, algorithm]
