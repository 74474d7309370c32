"""What a peer is: another project's routed-expert operator on one model's shape."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, TypeVar

import torch

from benchmarks.kernels_gpu import Model

DEVICE = torch.device("cuda")


class Peer(ABC):
    """`layers` layers of random weights in the peer's own layout, with its own operator.

    The whole operator counts: alignment or sorting of the routing, both matrix products, SwiGLU,
    and the weighted sum over a token's experts, as the peer's own code calls them.
    """

    precision: ClassVar[str]
    """The weights' format, as the rows name it."""
    weight_bits: ClassVar[float]
    """Bits a weight, its share of the scales included."""
    activations: ClassVar[torch.dtype] = torch.bfloat16
    """What `forward` takes."""

    def __init__(self, model: Model, layers: int) -> None:
        self.model = model
        self.layers = layers

    @classmethod
    def expert_bytes(cls, model: Model) -> int:
        """Bytes of one expert's three matrices, scales included."""
        return int(3 * model.hidden * model.intermediate * cls.weight_bits / 8)

    def route(self, ids: Sequence[torch.Tensor], weights: torch.Tensor) -> None:
        """Takes a new batch's routing, before anything is timed.

        Args:
            ids: for each layer the distinct experts of each token, int32 [tokens, top_k].
            weights: their weights, float32 [tokens, top_k].
        """
        self.ids = ids
        self.weights = weights

    @abstractmethod
    def forward(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """The layer's output for x, both [tokens, hidden]; capturable in a CUDA graph."""


T = TypeVar("T")


def each_layer(layers: int, make: Callable[[], T]) -> list[T]:
    return [make() for _ in range(layers)]


def random_words(*shape: int) -> torch.Tensor:
    """Random int32, which any packed integer or FP4 codes may be."""
    size = int(torch.Size(shape).numel())
    words = torch.empty((size + 1) // 2, dtype=torch.int64, device=DEVICE).random_()
    return words.view(torch.int32)[:size].view(shape)


def random_e8m0(*shape: int) -> torch.Tensor:
    """Scales 2^-9 to 2^-6."""
    exponents = torch.randint(118, 122, shape, dtype=torch.uint8, device=DEVICE)
    return exponents.view(torch.float8_e8m0fnu)


def random_bf16(*shape: int, near: float) -> torch.Tensor:
    """Uniform in [near/2, 3·near/2)."""
    scales = torch.rand(shape, dtype=torch.bfloat16, device=DEVICE)
    return scales.add_(0.5).mul_(near)
