"""The interface of a block format: how a checkpoint stores one matrix."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from moet.registry import Registry

Parts = Mapping[str, Tensor]


class BlockFormat(ABC):
    """A way to store a matrix W [N, K]: named part tensors, decoded exactly.

    Attributes:
        name: the registry's name.
        parts: names of the part tensors, in the order in which they are hashed and indexed.
        bits: stored bits a weight, scales included.
    """

    name: str
    parts: tuple[str, ...]
    bits: float

    @abstractmethod
    def decode(self, parts: Parts, dtype: torch.dtype = torch.float32) -> Tensor:
        """W [N, K] in float32 or float64, exact (no rounding step in between).

        Raises CheckpointError when a part is missing, has the wrong dtype or shape, or holds a
        scale that is NaN, infinite or negative.
        """

    @abstractmethod
    def encode(self, weight: Tensor, rule: str) -> dict[str, Tensor]:
        """Parts for W [N, K] float32, by a named scale rule (see each format)."""


FORMATS: Registry[BlockFormat] = Registry("block format")
