"""What calibrated levels know of a layer: the tokens that it saw, and how they were routed.

A token's row takes 2 · hidden bytes; a Hessian of every expert would take 4 · hidden² each. At any
real size the tokens are the smaller of the two, and every Hessian follows from them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class LayerSamples:
    """Tokens at the input of one layer's routed experts.

    x: [T, hidden], of the model with its experts at FP4. ids: int [T, k], the experts that each
    token goes to, −1 = none. weights: float32 [T, k], what their outputs are multiplied by.
    second_moment: float32 [hidden, hidden], Σ w x xᵀ / Σ w over the tokens, w = `token_weight`;
    None where it is still to be computed.
    quantized: [T, hidden], the same tokens where all layers before this one are at 2 bits; only
    level 3 has them.
    """

    x: Tensor
    ids: Tensor
    weights: Tensor
    second_moment: Tensor | None = None
    quantized: Tensor | None = None

    @property
    def tokens(self) -> int:
        return len(self.x)

    def of(self, expert: int) -> tuple[Tensor, Tensor]:
        """The tokens that go to an expert, int64 [n], and their weights, float32 [n]."""
        token, place = (self.ids == expert).nonzero(as_tuple=True)
        return token, self.weights[token, place]

    @cached_property
    def token_weight(self) -> Tensor:
        """Σ weight² over a token's experts, float32 [T]."""
        return torch.where(self.ids >= 0, self.weights, 0.0).square().sum(1)

    @cached_property
    def mean_square(self) -> float:
        """Mean of weight² over all pairs of a token and one of its experts; 0 where there is none.

        With it `n` pseudo-tokens are given the weight that `n` tokens of this layer have.
        """
        pairs = int((self.ids >= 0).sum())
        return float(self.token_weight.double().sum()) / pairs if pairs else 0.0


class SampleSource(ABC):
    """Where a calibrated quantizer looks its samples up.

    Attributes:
        digest: BLAKE3 in hex of all samples; a pack names it.
    """

    digest: str

    @abstractmethod
    def layer(self, layer: int) -> LayerSamples | None:
        """The samples of a layer; None for one that calibration did not reach (draft layers)."""
