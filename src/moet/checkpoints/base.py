"""Model families: what moet must know of a model to pack and serve it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch import Tensor

from moet.registry import Registry

Projection = Literal["gate", "up", "down"]
PROJECTIONS: tuple[Projection, ...] = ("gate", "up", "down")


@dataclass(frozen=True)
class Geometry:
    """The shape of a model's routed experts.

    moe_layers: the model's own indices of layers with routed experts, ascending, MTP included.
    mtp_layers: those of them that belong to the draft (multi-token prediction) head.
    swiglu_limit: the clamp of gate and up, or None.
    """

    architecture: str
    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    num_layers: int
    moe_layers: tuple[int, ...]
    mtp_layers: tuple[int, ...]
    swiglu_limit: float | None


@dataclass(frozen=True)
class TensorRef:
    """Where a tensor's bytes are: a file of the checkpoint, an absolute offset, a length."""

    name: str
    file: str
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class MatrixSource:
    """One expert matrix as stored: the parts of a block format (`formats.FORMATS[format]`)."""

    format: str
    shape: tuple[int, int]
    parts: Mapping[str, Tensor]


@dataclass(frozen=True)
class ExpertSource:
    """gate and up [intermediate, hidden], down [hidden, intermediate]."""

    gate: MatrixSource
    up: MatrixSource
    down: MatrixSource

    def __getitem__(self, projection: Projection) -> MatrixSource:
        match projection:
            case "gate":
                return self.gate
            case "up":
                return self.up
            case "down":
                return self.down


class ExpertWeights(NamedTuple):
    """An expert decoded: gate and up [intermediate, hidden], down [hidden, intermediate]."""

    gate: Tensor
    up: Tensor
    down: Tensor


class ExpertTensor(NamedTuple):
    """What the name of a routed expert's tensor says; `suffix` is the part, e.g. `weight_scale`."""

    layer: int
    expert: int
    projection: Projection
    suffix: str


class Family(ABC):
    """A line of models that share config keys and tensor names.

    Attributes:
        architectures: the values of config.json's `architectures[0]` that it answers for.
    """

    architectures: tuple[str, ...]

    @abstractmethod
    def geometry(self, config: Mapping[str, Any]) -> Geometry:
        """From config.json; raises CheckpointError for a missing or impossible key."""

    @abstractmethod
    def expert_prefix(self, layer: int, expert: int, projection: Projection) -> str:
        """The tensor name up to the part, e.g. `model.layers.3.mlp.experts.7.gate_proj`."""

    @abstractmethod
    def parse_expert(self, name: str) -> ExpertTensor | None:
        """The inverse of `expert_prefix`; None for every tensor that is not a routed expert's."""

    def is_expert_tensor(self, geometry: Geometry, name: str) -> bool:
        """Whether `name` is a tensor of one of the model's routed experts."""
        found = self.parse_expert(name)
        return (
            found is not None
            and found.layer in geometry.moe_layers
            and found.expert < geometry.num_experts
        )


FAMILIES: Registry[Family] = Registry("model family")
