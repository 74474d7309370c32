"""The oracle: every expert decoded to float32 and multiplied by torch, one token at a time."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moet.formats.layout import decode_row
from moet.formats.matrices import decode_matrix
from moet.kernels.base import OPERATORS, ExpertRows, ExpertsOperator, SwiGLU


@OPERATORS.register("reference")
class ReferenceExperts(ExpertsOperator):
    """What the operator means, written plainly; slow, and needs memory for a decoded expert."""

    name = "reference"
    any_swiglu = True

    def accumulate(
        self,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        rows: ExpertRows,
        activation: SwiGLU,
        out: Tensor,
    ) -> None:
        for index, expert in enumerate(rows.experts.tolist()):
            pairs = (topk_ids == expert).nonzero().tolist()
            if not pairs:
                continue
            gate, up, down = decoded(rows, index)
            width = gate.shape[0]
            bias = (
                torch.zeros(2, width) if rows.bias is None else torch.from_numpy(rows.bias[index])
            )
            for token, k in pairs:
                at = x[token].float()
                hidden = gated(gate @ at + bias[0], up @ at + bias[1], activation)
                out[token] += topk_weights[token, k] * (down @ hidden)


def gated(gate: Tensor, up: Tensor, activation: SwiGLU) -> Tensor:
    """gate · sigmoid(alpha · gate) · (up + beta), clamped first where there is a limit."""
    if activation.limit is not None:
        gate = gate.clamp(max=activation.limit)
        up = up.clamp(-activation.limit, activation.limit)
    return gate * torch.sigmoid(activation.alpha * gate) * (up + activation.beta)


def decoded(rows: ExpertRows, index: int) -> tuple[Tensor, Tensor, Tensor]:
    """gate, up [intermediate, hidden] and down [hidden, intermediate] of rows.experts[index]."""
    precision = rows.precision[index]
    layout = rows.layouts[precision]
    matrices = decode_row(layout, _memory(int(rows.address[index]), layout.payload_bytes))
    gate, up, down = (
        torch.from_numpy(decode_matrix(precision, matrix, float(factor)))
        for matrix, factor in zip(matrices, rows.factor[index], strict=True)
    )
    return gate, up, down


def _memory(address: int, size: int) -> NDArray[np.uint8]:
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
