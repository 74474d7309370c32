"""vLLM's fused Triton MoE: BF16, and FP8 with a scale per block of 128 × 128.

Tile sizes come from the configurations vLLM ships for the GPU and shape, its defaults elsewhere.
"""

from __future__ import annotations

import torch
from vllm.model_executor.layers.fused_moe.config import (
    FusedMoEQuantConfig,
    fp8_w8a8_moe_quant_config,
)
from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

from benchmarks.kernels_gpu import Model
from benchmarks.peers.base import DEVICE, Peer, each_layer

BLOCK = 128


def random_weights(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Normal weights; in bfloat16 of standard deviation 1/64, in FP8 of 64 (the scale has it)."""
    out = torch.empty(shape, dtype=dtype, device=DEVICE)
    for part in out:  # an expert at a time, so that no second copy is needed
        spread = 1 / 64 if dtype is torch.bfloat16 else 64.0
        part.copy_(torch.randn(part.shape, device=DEVICE, dtype=torch.bfloat16).mul_(spread))
    return out


class TritonBf16(Peer):
    precision = "BF16"
    weight_bits = 16
    dtype = torch.bfloat16

    def __init__(self, model: Model, layers: int) -> None:
        super().__init__(model, layers)
        e, h, i = model.experts, model.hidden, model.intermediate
        self.w1 = each_layer(layers, lambda: random_weights(e, 2 * i, h, dtype=self.dtype))
        self.w2 = each_layer(layers, lambda: random_weights(e, h, i, dtype=self.dtype))

    def quantization(self, layer: int) -> FusedMoEQuantConfig | None:
        return None

    def forward(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        return fused_experts(
            x,
            self.w1[layer],
            self.w2[layer],
            self.weights,
            self.ids[layer],
            quant_config=self.quantization(layer),
        )


class TritonFp8(TritonBf16):
    precision = "FP8, scale per 128 × 128"
    weight_bits = 8 + 32 / BLOCK**2
    dtype = torch.float8_e4m3fn

    def __init__(self, model: Model, layers: int) -> None:
        super().__init__(model, layers)
        e, h, i = model.experts, model.hidden // BLOCK, model.intermediate // BLOCK

        def scales(*shape: int) -> torch.Tensor:
            return torch.rand(shape, device=DEVICE).add_(0.5).mul_(2**-12)

        self.configs = each_layer(
            layers,
            lambda: fp8_w8a8_moe_quant_config(
                w1_scale=scales(e, 2 * i, h), w2_scale=scales(e, h, i), block_shape=[BLOCK, BLOCK]
            ),
        )

    def quantization(self, layer: int) -> FusedMoEQuantConfig | None:
        return self.configs[layer]
