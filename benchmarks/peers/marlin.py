"""vLLM's Marlin MoE: MXFP4 and int4 (WNA16), called as vLLM's MarlinExperts calls it.

Marlin's packing permutes codes and scales within an expert (gptq_marlin_repack,
marlin_permute_scales), so random words are the packing of some random weights.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from vllm import _custom_ops as ops
from vllm.model_executor.layers.fused_moe.experts.marlin_moe import fused_marlin_moe
from vllm.model_executor.layers.quantization.utils.marlin_utils import (
    MARLIN_MAX_BLOCKS_PER_SM,
    marlin_make_workspace_new,
)
from vllm.scalar_type import ScalarType, scalar_types

from benchmarks.kernels_gpu import Model
from benchmarks.peers.base import (
    Peer,
    each_layer,
    random_bf16,
    random_e8m0,
    random_words,
)

GROUP = 32


class MarlinPeer(Peer):
    kind: ClassVar[ScalarType]

    @classmethod
    @abstractmethod
    def scales(cls, *shape: int) -> torch.Tensor:
        """Random block scales of the peer's kind."""

    def __init__(self, model: Model, layers: int) -> None:
        super().__init__(model, layers)
        e, h, i = model.experts, model.hidden, model.intermediate
        self.w1 = each_layer(layers, lambda: random_words(e, h // 16, 2 * i * 2))
        self.w2 = each_layer(layers, lambda: random_words(e, i // 16, h * 2))
        self.s1 = each_layer(layers, lambda: self.scales(e, h // GROUP, 2 * i))
        self.s2 = each_layer(layers, lambda: self.scales(e, i // GROUP, h))
        device = torch.device("cuda", torch.cuda.current_device())
        self.workspace = marlin_make_workspace_new(device, MARLIN_MAX_BLOCKS_PER_SM)

    def forward(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        fused_marlin_moe(
            x,
            self.w1[layer],
            self.w2[layer],
            None,
            None,
            self.s1[layer],
            self.s2[layer],
            self.weights,
            self.ids[layer],
            quant_type_id=self.kind.id,
            workspace=self.workspace,
            moe_sum=lambda each, total, ids, expert_map: ops.moe_sum(each, total),
            output=out,
        )
        return out


class MarlinMxfp4(MarlinPeer):
    precision = "MXFP4"
    weight_bits = 4.25
    kind = scalar_types.float4_e2m1f

    @classmethod
    def scales(cls, *shape: int) -> torch.Tensor:
        return random_e8m0(*shape)


class MarlinInt4(MarlinPeer):
    precision = "int4, BF16 scale per 32"
    weight_bits = 4.5
    kind = scalar_types.uint4b8

    @classmethod
    def scales(cls, *shape: int) -> torch.Tensor:
        return random_bf16(*shape, near=2**-9)
