"""Routed experts of every family's checkpoint in float64, from names and formats written out here.

Independent of `moet.checkpoints` and `moet.formats`, and of the fixture writer: names as in the
published indexes, values by the formats' specifications, in numpy and ml_dtypes.
"""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open

F64 = NDArray[np.float64]
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])

HF = "model.layers.{layer}.mlp.experts.{expert}.{hf}_proj"
DRAFT = "mtp.{draft}.ffn.experts.{expert}.{w}"
NAMES = {
    "deepseek_v3": (HF, HF),
    "deepseek_v4": ("layers.{layer}.ffn.experts.{expert}.{w}", DRAFT),
    "deepseek_v4_0731": ("layers.{layer}.ffn.experts.{expert}.{w}", DRAFT),
    "glm4_moe": (HF, HF),
    "glm_moe_dsa": (HF, HF),
    "kimi_k2": (HF, HF),
    "kimi_k25": ("language_model." + HF, ""),
    "minimax_m2": ("model.layers.{layer}.block_sparse_moe.experts.{expert}.{w}", ""),
    "qwen3_moe": (HF, ""),
    "qwen3_next": (HF, "mtp.layers.{draft}.mlp.experts.{expert}.{hf}_proj"),
}
W = {"gate": "w1", "down": "w2", "up": "w3"}


class Official:
    """The tensors of a checkpoint directory by name."""

    def __init__(self, path: Path, family: str, layers: int) -> None:
        index = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
        self._where, self._path = index, path
        self._family, self._layers = family, layers

    def expert(self, layer: int, expert: int) -> tuple[F64, F64, F64]:
        """gate, up, down."""
        if self._family == "gpt_oss":
            return self._gpt_oss(layer, expert)
        if self._family.startswith("llama4"):
            return self._llama4(layer, expert)
        main, draft = NAMES[self._family]
        template = main if layer < self._layers else draft
        return tuple(
            self._matrix(
                template.format(
                    layer=layer, draft=layer - self._layers, expert=expert, hf=which, w=W[which]
                )
            )
            for which in ("gate", "up", "down")
        )

    def _tensor(self, name: str) -> torch.Tensor | None:
        if name not in self._where:
            return None
        with safe_open(self._path / self._where[name], "pt") as file:
            return file.get_tensor(name)

    def _matrix(self, prefix: str) -> F64:
        packed = self._tensor(f"{prefix}.weight_packed")
        if packed is not None:  # INT4, eight values a word
            words = packed.numpy().view(np.uint32)
            values = np.stack([(words >> 4 * i) & 15 for i in range(8)], -1).astype(np.float64) - 8
            values = values.reshape(words.shape[0], -1)
            return values * self._tensor(f"{prefix}.weight_scale").double().numpy().repeat(32, 1)
        weight = self._tensor(f"{prefix}.weight")
        if weight.dtype == torch.bfloat16:
            return weight.double().numpy()
        if weight.dtype == torch.int8:  # DeepSeek-V4's FP4
            scale = _e8m0(self._tensor(f"{prefix}.scale"))
            return _nibbles(weight.numpy().view(np.uint8)) * scale.repeat(32, 1)
        if weight.dtype == torch.uint8:  # NVFP4
            scale = self._tensor(f"{prefix}.weight_scale").double().numpy().repeat(16, 1)
            factor = self._tensor(f"{prefix}.weight_scale_2").double().item()
            return _nibbles(weight.numpy()) * scale * factor
        scale = self._tensor(f"{prefix}.weight_scale_inv")
        scale = self._tensor(f"{prefix}.scale") if scale is None else scale
        wide = scale.double().numpy().repeat(128, 0).repeat(128, 1)
        return weight.double().numpy() * wide[: weight.shape[0], : weight.shape[1]]

    def _gpt_oss(self, layer: int, expert: int) -> tuple[F64, F64, F64]:
        prefix = f"model.layers.{layer}.mlp.experts"
        both, down = (self._gpt_oss_matrix(f"{prefix}.{which}", expert)
                      for which in ("gate_up_proj", "down_proj"))  # fmt: skip
        return both[0::2], both[1::2], down

    def _gpt_oss_matrix(self, name: str, expert: int) -> F64:
        plain = self._tensor(name)
        if plain is not None:
            return plain[expert].double().numpy().T
        blocks = self._tensor(f"{name}_blocks")[expert].numpy()
        scales = np.ldexp(1.0, self._tensor(f"{name}_scales")[expert].numpy().astype(int) - 127)
        values = np.empty((*blocks.shape[:2], 32))
        for i in range(16):
            values[..., 2 * i] = E2M1[blocks[..., i] & 15]
            values[..., 2 * i + 1] = E2M1[blocks[..., i] >> 4]
        return (values * scales[..., None]).reshape(blocks.shape[0], -1)

    def _llama4(self, layer: int, expert: int) -> tuple[F64, F64, F64]:
        start = "" if self._family == "llama4_text" else "language_model."
        prefix = f"{start}model.layers.{layer}.feed_forward.experts"
        both = self._tensor(f"{prefix}.gate_up_proj")[expert].double().numpy()
        wide = both.shape[1] // 2
        down = self._tensor(f"{prefix}.down_proj")[expert].double().numpy()
        return both[:, :wide].T, both[:, wide:].T, down.T


def _nibbles(packed: NDArray[np.uint8]) -> F64:
    return E2M1[np.stack([packed & 15, packed >> 4], -1).reshape(packed.shape[0], -1)]


def _e8m0(scale: torch.Tensor) -> F64:
    return scale.view(torch.uint8).numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
