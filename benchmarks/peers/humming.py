"""humming-kernels' indexed MoE GEMMs, in the order vLLM's HummingIndexedExperts.apply runs them.

Read in vLLM 0.32 (fused_moe/experts/fused_humming_moe.py) and humming-kernels 0.1.17. The tuning is
humming's own for the GPU and the number of rows: what vLLM finds in humming's table of it, without
compiling the rest of that table.
"""

from __future__ import annotations

import json
from typing import Any, ClassVar

import torch
from humming.config import GemmType
from humming.forward import humming_forward, may_process_input
from humming.schema import HummingWeightSchema
from humming.transform import prepare_and_transform_humming_tensors
from humming.tune import get_heuristics_config
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size
from vllm.model_executor.layers.fused_moe.moe_fused_mul_sum import moe_fused_mul_sum
from vllm.model_executor.layers.quantization.utils.humming.activation import (
    get_humming_activation,
)
from vllm.utils.humming import create_humming_locks

from benchmarks.kernels_gpu import Model
from benchmarks.peers.base import (
    DEVICE,
    Peer,
    each_layer,
    random_bf16,
    random_e8m0,
    random_words,
)

COMPUTE = json.dumps(
    {"use_batch_invariant": False, "use_f16_accum": False, "gemm_type": GemmType.INDEXED.value}
)


class Matrix:
    """One of an expert's two stacked matrices, [experts, rows, columns], for every layer."""

    def __init__(
        self, rows: int, columns: int, experts: int, layers: int, dtype: str, bits: int, group: int,
        e8m0: bool,
    ) -> None:  # fmt: skip
        schema = HummingWeightSchema(
            b_dtype=dtype,
            bs_dtype="float8e8m0" if e8m0 else None,
            weight_scale_group_size=group,
        )

        def make() -> dict[str, torch.Tensor]:
            shape = (experts, rows, columns // group)
            tensors = {
                "weight": random_words(experts, rows, columns * bits // 32),
                "weight_scale": random_e8m0(*shape) if e8m0 else random_bf16(*shape, near=2**-8),
            }
            self.config, packed = prepare_and_transform_humming_tensors(
                tensors=tensors,
                shape_n=rows,
                shape_k=columns,
                pad_n_to_multiple=256,
                pad_k_to_multiple=128,
                weight_schema=schema,
                num_experts=experts,
                torch_dtype=torch.bfloat16,
                device=DEVICE,
            )
            return packed

        self.tensors = each_layer(layers, make)

    def tuning(self, rows: int) -> tuple[int, str]:
        """humming's choice for `rows` routed rows: its block of rows, and all of it as JSON."""
        chosen = get_heuristics_config(
            layer_config=self.config, shape_m=rows, gemm_type=GemmType.INDEXED
        )
        return int(chosen["block_shape"][0]), json.dumps(chosen)

    def forward(self, layer: int, x: torch.Tensor, out: torch.Tensor, **arguments: Any) -> None:
        packed = self.tensors[layer]
        humming_forward(
            self.config,
            inputs=x,
            weight=packed["weight"],
            weight_scale=packed["weight_scale"],
            outputs=out,
            compute_config=COMPUTE,
            **arguments,
        )


class HummingPeer(Peer):
    dtype: ClassVar[str]
    bits: ClassVar[int]
    group: ClassVar[int] = 32
    e8m0: ClassVar[bool] = True

    def __init__(self, model: Model, layers: int) -> None:
        super().__init__(model, layers)
        kind = (self.dtype, self.bits, self.group, self.e8m0)
        shape = (model.experts, layers)
        self.gate_up = Matrix(2 * model.intermediate, model.hidden, *shape, *kind)
        self.down = Matrix(model.hidden, model.intermediate, *shape, *kind)
        self.locks = create_humming_locks(DEVICE)
        self.activation = get_humming_activation(MoEActivation.SILU)

    def forward(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        model, ids = self.model, self.ids[layer]
        rows = ids.numel()

        def aligned(block: int) -> dict[str, torch.Tensor]:
            names = ("sorted_ids", "expert_ids", "num_tokens_padded")
            parts = moe_align_block_size(ids, block, model.experts, ignore_invalid_experts=True)
            return dict(zip(names, parts, strict=True))

        block, tuning = self.gate_up.tuning(rows)
        down_block, down_tuning = self.down.tuning(rows)
        common = {"locks": self.locks, "valid_shape_m": rows}
        routing = aligned(block)
        hidden = x.new_empty(rows, 2 * model.intermediate)
        self.gate_up.forward(
            layer, x, hidden, top_k=model.top_k, tuning_config=tuning, **common, **routing
        )
        active, _, _ = may_process_input(
            self.down.config,
            inputs=hidden,
            outputs=x.new_empty(rows, model.intermediate),
            **self.activation,
        )
        if down_block != block:
            routing = aligned(down_block)
        each = x.new_empty(rows, model.hidden)
        self.down.forward(
            layer, active, each, top_k=1, tuning_config=down_tuning, **common, **routing
        )
        return moe_fused_mul_sum(
            inputs=each.view(*ids.shape, -1),
            topk_weights=self.weights,
            topk_ids=ids,
            outputs=torch.empty_like(x),
        )


class HummingUint2(HummingPeer):
    """Our base's bytes: 2 bits, an 8-bit scale for 32 weights."""

    precision = "uint2, E8M0 scale per 32"
    weight_bits = 2.25
    dtype, bits = "uint2", 2


class HummingUint2Group128(HummingPeer):
    """What 2-bit checkpoints for vLLM hold."""

    precision = "uint2, BF16 scale per 128"
    weight_bits = 2.125
    dtype, bits, group, e8m0 = "uint2", 2, 128, False


class HummingMxfp4(HummingPeer):
    precision = "MXFP4"
    weight_bits = 4.25
    dtype, bits = "float4e2m1", 4
