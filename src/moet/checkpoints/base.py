"""Model families: what moet must know of a model to pack and serve it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from torch import Tensor

from moet.registry import Registry

if TYPE_CHECKING:
    from moet.checkpoints.storage import Storage

Projection = Literal["gate", "up", "down"]
PROJECTIONS: tuple[Projection, ...] = ("gate", "up", "down")


@dataclass(frozen=True)
class Geometry:
    """The shape of a model's routed experts, and what their computation must honour.

    moe_layers: the model's own indices of layers with routed experts, ascending, MTP included.
    mtp_layers: those of them that belong to the draft (multi-token prediction) head; where a
        checkpoint counts these apart (`mtp.0`), they follow the last layer, as in vLLM.
    swiglu_limit: the clamp of gate (from above) and up (both ways), or None.
    swiglu_alpha, swiglu_beta: h = gate · sigmoid(alpha · gate) · (up + beta).
    biases: whether gate, up and down have biases.
    router_weight_on_input: whether a token's routing weight scales the expert's input, not its
        output.
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
    swiglu_alpha: float = 1.0
    swiglu_beta: float = 0.0
    biases: bool = False
    router_weight_on_input: bool = False


@dataclass(frozen=True)
class TensorRef:
    """Where a tensor's bytes are: a file of the checkpoint, an absolute offset, a length.

    Of a stack of all experts, one expert's block has a ref of its own, under the stack's name.
    """

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
    """What the name of a routed expert's tensor says; `suffix` is the part, e.g. `weight_scale`.

    expert: None for a stack of all experts of the layer. projection: of a stack with gate and up in
    one tensor, "gate".
    """

    layer: int
    expert: int | None
    projection: Projection
    suffix: str


class Family(ABC):
    """A line of models that share config keys and tensor names.

    Attributes:
        architectures: the values of config.json's `architectures[0]` that it answers for.
        forms: the ways in which its checkpoints store experts, each of another format.
    """

    architectures: tuple[str, ...]
    forms: tuple[Storage, ...]

    @abstractmethod
    def geometry(self, config: Mapping[str, Any]) -> Geometry:
        """From config.json; raises CheckpointError for a missing or impossible key."""

    @abstractmethod
    def declared_format(self, config: Mapping[str, Any], modelopt: Mapping[str, Any] | None) -> str:
        """The experts' block format by config.json and hf_quant_config.json (None if absent).

        Raises CheckpointError for a quantization that is not known, or for two that differ.
        """

    @abstractmethod
    def expert_prefix(
        self, geometry: Geometry, layer: int, expert: int, projection: Projection
    ) -> str:
        """The tensor name up to the part, e.g. `model.layers.3.mlp.experts.7.gate_proj`."""

    @abstractmethod
    def tensor_name(self, prefix: str, suffix: str) -> str:
        """The whole name: `expert_prefix` and the part's suffix (`StoredPart.suffix`)."""

    @abstractmethod
    def parse_expert(self, geometry: Geometry, name: str) -> ExpertTensor | None:
        """The inverse of `tensor_name`; None for every tensor that is not a routed expert's."""

    def is_expert_tensor(self, geometry: Geometry, name: str) -> bool:
        """Whether `name` is a tensor of the model's routed experts' weights (biases are none)."""
        found = self.parse_expert(geometry, name)
        return (
            found is not None
            and found.layer in geometry.moe_layers
            and (found.expert is None or found.expert < geometry.num_experts)
        )


FAMILIES: Registry[Family] = Registry("model family")
