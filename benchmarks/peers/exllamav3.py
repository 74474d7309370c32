"""exllamav3's MoE at 2 bits (EXL3 trellis, mul1 codebook), from `exllamav3_build`'s library.

Follows BlockSparseMLP.forward of exllamav3 1.6.5: up to 8 tokens its fused decode kernels
(exl3_moe_coop), above that its fused expert kernel in row tiles (exl3_moe, then exl3_moe_gather),
as long as no expert has more than 256 tokens; more than that it dequantizes, which is left out
here. The counts that choose the tiles are read back before anything is timed (exllamav3 waits for
them in every layer). Activations are float16, as exllamav3's are.
"""

from __future__ import annotations

from collections.abc import Sequence

import exllamav3_moe as kernels
import torch

from benchmarks.kernels_gpu import Model
from benchmarks.peers.base import DEVICE, Peer, each_layer, random_words
from moet.errors import ConfigError

DECODE_TOKENS = 8
FUSED_ROWS = 256
ROW_TILES = ((33, FUSED_ROWS, 64), (17, 32, 32), (1, 16, 16))
"""(fewest, most) tokens an expert, and the tile of rows they run in."""
K = 2.0


class Trellis:
    """One projection [inputs, outputs] of every expert: K bits a weight, and two sign vectors."""

    def __init__(self, inputs: int, outputs: int, experts: int) -> None:
        self.codes = random_words(experts, inputs // 16, outputs // 16, int(16 * K) // 2)
        self.suh = self._signs(experts, inputs, 1 / 64)
        self.svh = self._signs(experts, outputs, 1.0)
        self.pointers = tuple(self._addresses(t) for t in (self.codes, self.suh, self.svh))

    @staticmethod
    def _signs(experts: int, size: int, scale: float) -> torch.Tensor:
        signs = torch.randint(0, 2, (experts, size), device=DEVICE)
        return ((2 * signs - 1) * scale).half()

    @staticmethod
    def _addresses(tensor: torch.Tensor) -> torch.Tensor:
        step = tensor.stride(0) * tensor.element_size()
        return tensor.data_ptr() + step * torch.arange(tensor.shape[0], device=DEVICE)


class ExllamaV3(Peer):
    precision = "EXL3, 2 bits"
    weight_bits = 2
    activations = torch.half

    @classmethod
    def expert_bytes(cls, model: Model) -> int:
        vectors = 3 * 2 * (model.hidden + model.intermediate)
        return super().expert_bytes(model) + vectors

    def __init__(self, model: Model, layers: int) -> None:
        super().__init__(model, layers)
        e, h, i = model.experts, model.hidden, model.intermediate
        shapes = ((h, i), (h, i), (i, h))
        self.matrices = each_layer(layers, lambda: [Trellis(*shape, e) for shape in shapes])
        slots = DECODE_TOKENS * model.top_k
        half = {"dtype": torch.half, "device": DEVICE}
        self.scratch = [
            torch.empty(slots, h, **half), torch.empty(slots, h, **half),
            torch.empty(slots, i, **half), torch.empty(slots, i, **half),
            torch.empty(slots, i, **half), torch.empty(slots, h, device=DEVICE),
        ]  # fmt: skip
        counters = slots * (i // 128) + DECODE_TOKENS * (h // 128) + 2 * slots + 3
        self.counters = torch.zeros(counters, dtype=torch.int32, device=DEVICE)
        self.out = torch.empty(DECODE_TOKENS, h, device=DEVICE)
        groups = kernels.exl3_moe_max_concurrency(0)
        self.fused_scratch = [
            torch.empty(groups, FUSED_ROWS, size, **half) for size in (h, h, i, i)
        ]

    def route(self, ids: Sequence[torch.Tensor], weights: torch.Tensor) -> None:
        super().route([i.long() for i in ids], weights.half())
        counts = [torch.bincount(i.flatten(), minlength=self.model.experts).tolist() for i in ids]
        if len(weights) > DECODE_TOKENS and max(map(max, counts)) > FUSED_ROWS:
            raise ConfigError(f"exllamav3 dequantizes experts with over {FUSED_ROWS} tokens.")
        if weights.numel() <= FUSED_ROWS:  # then it does not wait for the counts
            self.launches = [[(1, FUSED_ROWS, 16, -1)]] * len(ids)
            return
        self.launches = [
            [
                (low, high, tile, sum(low <= count <= high for count in layer))
                for low, high, tile in ROW_TILES
            ]
            for layer in counts
        ]

    def forward(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        run = self._decode if len(x) <= DECODE_TOKENS else self._fused
        return run(layer, x)

    def _pointers(self, layer: int) -> list[torch.Tensor]:
        return [pointers for matrix in self.matrices[layer] for pointers in matrix.pointers]

    def _decode(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        kernels.exl3_moe_coop(
            x, self.ids[layer], self.weights, -1, -1, self.model.hidden,
            *self._pointers(layer), None, None, None, K, K, K, False, True, 0, 0.0, True,
            *self.scratch, self.counters, self.out, None, None,
        )  # fmt: skip
        return self.out[: len(x)]

    def _fused(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        ids, experts = self.ids[layer].flatten(), self.model.experts
        order = ids.argsort()
        token = torch.arange(len(ids), device=DEVICE).div(self.model.top_k, rounding_mode="floor")
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(ids), device=DEVICE))
        counts = torch.zeros(experts + 1, dtype=torch.long, device=DEVICE)
        counts.index_add_(0, ids, torch.ones_like(ids))
        start = counts.cumsum(0) - counts
        weights = self.weights.flatten()[order]
        out = torch.zeros(x.shape, device=DEVICE)
        slots = torch.empty(len(ids), x.shape[1], device=DEVICE)
        for low, high, tile, active in self.launches[layer]:
            if active:
                kernels.exl3_moe(
                    x, out, counts, token[order], weights, *self.fused_scratch, 0, K, K, K,
                    *self._pointers(layer), False, True, False, True, False, True, 0.0,
                    active, slots, start, low, high, tile,
                )  # fmt: skip
        kind = (counts > 0).long()
        kernels.exl3_moe_gather(
            out, slots, ids, inverse, start[:experts], start[:experts], kind[:experts], weights
        )
        return out
