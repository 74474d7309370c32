"""The families that are served or loaded on a GPU, and with what checkpoints and engines."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.fixtures.checkpoints import Format


@dataclass(frozen=True)
class Case:
    """A family's checkpoint and engine.

    format: of the experts. written: arguments of `write_checkpoint`. options: of the engine. name:
    of the family in tables.
    """

    format: Format
    written: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    name: str = ""


MLA = {"qk_nope_head_dim": 128, "v_head_dim": 128}  # which FlashAttention has on Hopper
TRITON = {"attention_backend": "TRITON_ATTN"}  # not every build of FlashAttention has heads of 64
SERVED = {
    "glm4_moe": Case("nvfp4", {"mtp_format": "bf16"}, TRITON, name="GLM-4.5"),
    "gpt_oss": Case("mxfp4", {"layers": 2}, TRITON, name="gpt-oss"),
    # The vision tower is there; profiling it would need the processor's files.
    "kimi_k25": Case("nvfp4", {"shape": MLA}, {"skip_mm_profiling": True}, name="Kimi-K2.7"),
    "kimi_k2": Case("int4_group", {"shape": MLA}, name="Kimi-K2"),
    # Text only: the vision tower is loaded below.
    "llama4": Case(
        "bf16",
        {"top_k": 1, "layers": 2},
        TRITON | {"limit_mm_per_prompt": {"image": 0}},
        name="Llama 4 (multimodal class)",
    ),
    "llama4_text": Case("bf16", {"top_k": 1, "layers": 2}, TRITON, name="Llama 4"),
    "minimax_m2": Case("fp8_block", options=TRITON, name="MiniMax-M2"),
    "qwen3_moe": Case("fp8_block", options=TRITON, name="Qwen3-MoE"),
    "qwen3_next": Case(
        "bf16",
        {"layers": 2, "mtp": False},
        TRITON | {"additional_config": {"gdn_prefill_backend": "triton"}},
        name="Qwen3-Next",
    ),
}
LOADED = {
    "deepseek_v4": Case("mxfp4", {"dense_fp8": True, "mtp": False}),
    "deepseek_v4_0731": Case("mxfp4", {"dense_fp8": True, "mtp": False}),
    "glm_moe_dsa": Case("nvfp4", {"mtp": False}),
    "llama4": Case("bf16", {"top_k": 1, "layers": 2}),
}
