"""Random layers of experts at the geometries of real models, in GPU memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moet.formats.layout import Precision, RowLayout, max_slices
from moet.kernels.base import SwiGLU
from moet.kernels.cuda.decode import DecodeExperts
from moet.kernels.cuda.experts import CudaExperts
from moet.kernels.cuda.prefill import PrefillExperts
from moet.kernels.cuda.shape import PRECISION_CODES, REMOTE, ExpertsShape

POOL_BYTES = 24 << 30
MIXTURE = "base + 20 % mxfp4"


@dataclass(frozen=True)
class Model:
    """A layer's geometry."""

    name: str
    hidden: int
    intermediate: int
    experts: int
    top_k: int

    def flops(self, tokens: int) -> float:
        """Of all routed experts of a layer."""
        return 2.0 * 3 * self.hidden * self.intermediate * self.top_k * tokens


MODELS = [
    Model("DeepSeek-V4-Flash", 4096, 2048, 256, 6),
    Model("DeepSeek-V4-Flash TP2", 4096, 1024, 256, 6),
    Model("DeepSeek-V4-Flash TP4", 4096, 512, 256, 6),
    Model("GLM-5.2", 6144, 2048, 256, 8),
    Model("Kimi-K2.7", 7168, 2048, 384, 8),
    Model("Qwen3-30B-A3B", 2048, 768, 128, 8),
]


def precisions_of(kind: str, experts: int) -> list[Precision]:
    """Each expert's precision, of a kind that names one, or of the mixture."""
    if kind == MIXTURE:
        return [Precision.MXFP4 if e % 5 == 0 else Precision.BASE for e in range(experts)]
    return [Precision(kind)] * experts


class Layers:
    """Several layers, each with rows of its own: random codes, scales of moderate size."""

    def __init__(self, model: Model, kind: str, most: int = 8) -> None:
        slices = max_slices(model.intermediate)
        precisions = precisions_of(kind, model.experts)
        layouts = {
            p: RowLayout(p, model.hidden, model.intermediate, slices) for p in set(precisions)
        }
        sizes = torch.tensor([layouts[p].row_bytes for p in precisions])
        offsets = torch.cumsum(sizes, 0) - sizes
        self.model, self.layouts = model, layouts
        self.payload = torch.tensor([layouts[p].payload_bytes for p in precisions])
        self.count = int(max(2, min(most, POOL_BYTES // int(sizes.sum()))))
        pool = torch.empty((self.count, int(sizes.sum())), dtype=torch.uint8, device="cuda")
        pool.view(torch.int64).random_()
        for e, p in enumerate(precisions):
            layout, start = layouts[p], int(offsets[e])
            part = pool[:, start : start + layout.payload_bytes].view(
                self.count, slices, layout.slice_bytes
            )
            for a, b in (
                (layout.gate_up_scales, layout.down_codes),
                (layout.down_scales, layout.slice_bytes),
            ):
                part[:, :, a:b].remainder_(4).add_(121 if p is Precision.MXFP4 else 0x30)
        self.pool, self._offsets, self._sizes = pool, offsets, sizes
        self.address = (
            pool.data_ptr() + (torch.arange(self.count)[:, None] * int(sizes.sum()) + offsets[None])
        ).cuda()
        codes = torch.tensor([PRECISION_CODES[p] for p in precisions], dtype=torch.uint8)
        self.precision = codes.repeat(self.count, 1).cuda()
        self.factor = torch.full((model.experts, 3), 0.01, device="cuda")

    @property
    def shape(self) -> ExpertsShape:
        return ExpertsShape.of(self.layouts, self.model.experts, self.model.top_k)

    def operator(self, fp8_activations: bool = False) -> CudaExperts:
        return CudaExperts(self.shape, torch.device("cuda"), fp8_activations=fp8_activations)

    def to_host(self, layer: int, experts: list[int]) -> Tensor:
        """Moves rows to pinned host memory; keep the result while they are used."""
        size = int(self._sizes.max())
        host = torch.empty((len(experts), size), dtype=torch.uint8, pin_memory=True)
        for i, e in enumerate(experts):
            start = int(self._offsets[e])
            host[i, : self._sizes[e]].copy_(self.pool[layer, start : start + int(self._sizes[e])])
            self.address[layer, e] = host.data_ptr() + i * size
            self.precision[layer, e] += REMOTE
        return host


class Batch:
    """Tokens with random distinct experts, and where their output goes."""

    def __init__(self, layers: Layers, tokens: int, ids: list[Tensor] | None = None) -> None:
        model = layers.model
        self._layers = layers
        self.x = torch.randn(tokens, model.hidden, device="cuda").bfloat16()
        self.weights = torch.full((tokens, model.top_k), 1 / model.top_k, device="cuda")
        self.ids = ids or [
            torch.rand(tokens, model.experts, device="cuda").topk(model.top_k).indices.int()
            for _ in range(layers.count)
        ]
        self.out = torch.empty(tokens, model.hidden, device="cuda")
        read = [i.unique().cpu().long() for i in self.ids]
        self.experts_read = sum(len(i) for i in read) / len(read)
        self.bytes_read = sum(int(layers.payload[i].sum()) for i in read) / len(read)

    def run(self, operator: CudaExperts | DecodeExperts | PrefillExperts) -> None:
        """All layers, one after another."""
        layers = self._layers
        for layer, ids in enumerate(self.ids):
            operator.forward(
                self.x, ids, self.weights, layers.address[layer], layers.precision[layer],
                layers.factor, SwiGLU(10.0), self.out,
            )  # fmt: skip
