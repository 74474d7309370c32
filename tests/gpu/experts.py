"""Random experts on the GPU, and what they should give."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moet.formats.layout import Precision, RowLayout, decode_row
from moet.kernels.base import SwiGLU
from moet.kernels.cuda.decode import DecodeExperts
from moet.kernels.cuda.shape import PRECISION_CODES, ExpertsShape

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
BASE = np.array([1, 4, -1, -4])


def random_row(layout: RowLayout, generator: torch.Generator) -> Tensor:
    """uint8 [row_bytes] on the generator's device: random codes, scales within two octaves."""
    row = torch.randint(
        0, 256, (layout.row_bytes,), dtype=torch.uint8, device=generator.device, generator=generator
    )
    start = {Precision.BASE: 0x20, Precision.NVFP4: 0x30, Precision.MXFP4: 121}[layout.precision]
    spread = 3 if layout.precision is Precision.MXFP4 else 16
    for index in range(layout.slices):
        part = row[index * layout.slice_bytes : (index + 1) * layout.slice_bytes]
        for a, b in (
            (layout.gate_up_scales, layout.down_codes),
            (layout.down_scales, layout.slice_bytes),
        ):
            part[a:b] = start + part[a:b] % spread
    return row


def dense(layout: RowLayout, row: Tensor, factor: Tensor) -> list[Tensor]:
    """(gate, up, down), float64, decoded by the layout's own definition."""
    result = []
    for matrix, f in zip(decode_row(layout, row.cpu().numpy()), factor.tolist(), strict=True):
        codes = (BASE if layout.precision is Precision.BASE else E2M1)[matrix.codes]
        if layout.precision is Precision.MXFP4:
            scales = np.exp2(matrix.scales.astype(np.float64) - 127)
        else:
            e4m3 = torch.from_numpy(matrix.scales).view(torch.float8_e4m3fn)
            scales = e4m3.to(torch.float64).numpy()
        result.append(torch.from_numpy(codes * scales.repeat(layout.precision.block, axis=1) * f))
    return result


@dataclass
class Layer:
    """A layer's rows and device tables."""

    layouts: dict[Precision, RowLayout]
    precisions: list[Precision]
    rows: list[Tensor]
    address: Tensor
    precision: Tensor
    factor: Tensor

    @classmethod
    def random(
        cls,
        layouts: dict[Precision, RowLayout],
        precisions: list[Precision],
        seed: int,
        device: str = "cuda",
    ) -> Layer:
        """One expert for each of `precisions`."""
        generator = torch.Generator(device).manual_seed(seed)
        rows = [random_row(layouts[p], generator) for p in precisions]
        hidden = next(iter(layouts.values())).hidden
        scale = {Precision.BASE: 2.0, Precision.MXFP4: 8.0, Precision.NVFP4: 0.5}
        factor = torch.rand(len(rows), 3, device=device, generator=generator) + 0.5
        for i, p in enumerate(precisions):
            factor[i] *= scale[p] / hidden**0.5
        return cls(
            layouts, precisions, rows,
            torch.tensor([r.data_ptr() for r in rows], device=device),
            torch.tensor([PRECISION_CODES[p] for p in precisions], dtype=torch.uint8).to(device),
            factor,
        )  # fmt: skip

    def shape(self, top_k: int) -> ExpertsShape:
        return ExpertsShape.of(self.layouts, len(self.rows), top_k)

    def decoding(
        self, top_k: int, out_dtype: torch.dtype = torch.float32, most_tokens: int = 16
    ) -> DecodeExperts:
        return DecodeExperts(
            self.shape(top_k), self.factor.device, out_dtype, most_tokens=most_tokens
        )

    def reference(self, x: Tensor, ids: Tensor, weights: Tensor, activation: SwiGLU) -> Tensor:
        """float64 [T, hidden] on the CPU; the hidden activations are not rounded to BF16 as in the
        kernels' contract (BF16 activations)."""
        out = torch.zeros(x.shape, dtype=torch.float64)
        inputs = x.cpu().double()
        for expert in ids.unique().tolist():
            if expert < 0 or int(self.address[expert]) == 0:
                continue
            layout = self.layouts[self.precisions[expert]]
            gate, up, down = dense(layout, self.rows[expert], self.factor[expert])
            token, k = (ids.cpu() == expert).nonzero(as_tuple=True)
            g, u = inputs[token] @ gate.T, inputs[token] @ up.T
            if activation.limit is not None:
                g, u = g.clamp(max=activation.limit), u.clamp(-activation.limit, activation.limit)
            h = torch.nn.functional.silu(g) * u
            out[token] += weights.cpu().double()[token, k, None] * (h @ down.T)
        return out


def random_routing(
    tokens: int, experts: int, top_k: int, seed: int, device: str = "cuda"
) -> tuple[Tensor, Tensor]:
    """(ids int32, weights float32), each [tokens, top_k]."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, experts, generator=generator).topk(top_k).indices
    weights = torch.rand(tokens, top_k, generator=generator) + 0.1
    return ids.to(torch.int32).to(device), (weights / weights.sum(1, keepdim=True)).to(device)


def relative_error(out: Tensor, reference: Tensor) -> float:
    difference = out.cpu().double() - reference
    return float(difference.norm() / reference.norm())
