"""Experts with random codes and scales, as rows in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moet.formats.layout import Matrix, Precision, RowLayout, encode_row
from moet.formats.matrices import decode_to
from moet.kernels import ExpertRows, SwiGLU

# Scale bytes drawn by precision: all magnitudes of a real expert, subnormal E4M3 included.
SCALES = {
    Precision.BASE: (0x08, 0x6F),
    Precision.MXFP4: (115, 130),
    Precision.NVFP4: (0x00, 0x7F),
}
# Factors that bring a product of two matrices of such weights back to about one.
FACTORS = {Precision.BASE: 0.0005, Precision.MXFP4: 0.002, Precision.NVFP4: 0.0002}


@dataclass
class Experts:
    """rows: where they are; memory: keeps them alive; matrices: gate, up, down of each."""

    rows: ExpertRows
    memory: list[NDArray[np.uint8]]
    matrices: list[tuple[Matrix, Matrix, Matrix]]

    def wave(self, indices: Sequence[int]) -> ExpertRows:
        """The rows of some experts, by their place in `rows`."""
        pick = np.array(indices, np.int64)
        precision = [self.rows.precision[i] for i in indices]
        return ExpertRows(
            self.rows.experts[pick],
            self.rows.address[pick],
            precision,
            self.rows.factor[pick],
            {p: self.rows.layouts[p] for p in precision},
            None if self.rows.bias is None else self.rows.bias[pick],
        )

    def exact(self, x: Tensor, ids: Tensor, weights: Tensor, activation: SwiGLU) -> Tensor:
        """The layer's output in float64."""
        out = torch.zeros(x.shape, dtype=torch.float64)
        for index, expert in enumerate(self.rows.experts.tolist()):
            pairs = (ids == expert).nonzero().tolist()
            if not pairs:
                continue
            precision = self.rows.precision[index]
            gate, up, down = (
                decode_to(precision, matrix, float(factor), torch.float64)
                for matrix, factor in zip(
                    self.matrices[index], self.rows.factor[index], strict=True
                )
            )
            for token, k in pairs:
                g, u = gate @ x[token].double(), up @ x[token].double()
                if self.rows.bias is not None:
                    bias = torch.from_numpy(self.rows.bias[index]).double()
                    g, u = g + bias[0], u + bias[1]
                if activation.limit is not None:
                    g = g.clamp(max=activation.limit)
                    u = u.clamp(-activation.limit, activation.limit)
                y = down @ (g * torch.sigmoid(activation.alpha * g) * (u + activation.beta))
                out[token] += weights[token, k].double() * y
        return out


def make_experts(
    precisions: Sequence[Precision],
    hidden: int,
    intermediate: int,
    slices: int = 1,
    seed: int = 0,
    first: int = 0,
    stride: int = 1,
    biased: bool = False,
) -> Experts:
    """Experts first, first + stride, … of the given precisions."""
    rng = np.random.default_rng(seed)
    layouts = {p: RowLayout(p, hidden, intermediate, slices) for p in set(precisions)}
    memory, matrices = [], []
    for precision in precisions:
        shapes = ((intermediate, hidden), (intermediate, hidden), (hidden, intermediate))
        gate, up, down = (_matrix(rng, precision, *shape) for shape in shapes)
        row = np.empty(layouts[precision].row_bytes, np.uint8)
        encode_row(layouts[precision], gate, up, down, row)
        memory.append(row)
        matrices.append((gate, up, down))
    count = len(precisions)
    factors = np.array([FACTORS[p] for p in precisions])[:, None] * rng.uniform(0.5, 2, (count, 3))
    rows = ExpertRows(
        first + stride * np.arange(count, dtype=np.int64),
        np.array([row.ctypes.data for row in memory], np.int64),
        list(precisions),
        factors.astype(np.float32),
        layouts,
        rng.standard_normal((count, 2, intermediate), np.float32) if biased else None,
    )
    return Experts(rows, memory, matrices)


def _matrix(rng: np.random.Generator, precision: Precision, n: int, k: int) -> Matrix:
    codes = rng.integers(0, 1 << precision.code_bits, (n, k), dtype=np.uint8)
    low, high = SCALES[precision]
    return Matrix(codes, rng.integers(low, high, (n, k // precision.block), dtype=np.uint8))


def routing(tokens: int, experts: Sequence[int], k: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """(topk_ids int32 [tokens, k], topk_weights float32): k different experts a token."""
    rng = np.random.default_rng(seed)
    picks = [rng.choice(np.asarray(experts), k, replace=False) for _ in range(tokens)]
    ids = np.array(picks, np.int32).reshape(tokens, k)
    return torch.from_numpy(ids), torch.from_numpy(rng.random((tokens, k), np.float32) + 0.1)
