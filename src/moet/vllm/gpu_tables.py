"""At which precision a GPU computes each expert, and with which factors: tables in its memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moet.formats.layout import Precision
from moet.kernels.cuda.shape import PRECISION_CODES
from moet.pack import RowSource
from moet.vllm.rank import factors_of

ByLayer = Mapping[int, Sequence[Precision]]
"""A precision of every expert of every layer."""


@dataclass(frozen=True)
class ExpertTable:
    """code: uint8 [layers, experts], PRECISION_CODES. factors: float32 [layers, experts, 3]. Both
    on the device, layers ascending."""

    code: Tensor
    factors: Tensor

    @classmethod
    def of(cls, precision: ByLayer, source: RowSource, device: torch.device) -> ExpertTable:
        factors = [factors_of(source, layer, precision[layer]) for layer in sorted(precision)]
        return cls(
            torch.from_numpy(codes(precision)).to(device),
            torch.from_numpy(np.stack(factors)).to(device),
        )

    def become(self, other: ExpertTable) -> None:
        """Behind what the current stream has been given so far."""
        self.code.copy_(other.code)
        self.factors.copy_(other.factors)

    def mix(self, own: ExpertTable, other: ExpertTable, members: NDArray[np.bool_]) -> None:
        """Becomes `other` for the members, bool [layers, experts], and `own` for the rest."""
        chosen = torch.from_numpy(members).to(self.code.device)
        torch.where(chosen, other.code, own.code, out=self.code)
        torch.where(chosen[..., None], other.factors, own.factors, out=self.factors)


def codes(precision: ByLayer) -> NDArray[np.uint8]:
    """PRECISION_CODES, uint8 [layers, experts], layers ascending."""
    return np.array(
        [[PRECISION_CODES[p] for p in precision[layer]] for layer in sorted(precision)], np.uint8
    )


def all_at(recovery: Mapping[int, Precision], num_experts: int) -> dict[int, list[Precision]]:
    """Recovery's precision for every expert."""
    return {layer: [precision] * num_experts for layer, precision in recovery.items()}
