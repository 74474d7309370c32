"""Tensor names of routed experts: a tensor a matrix, or stacks of all experts of a layer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from moet.checkpoints.base import ExpertTensor, Family, Geometry, Projection
from moet.checkpoints.declared import declared_format

_NUMBER = r"(0|[1-9]\d*)"


class PerExpertNames(Family):
    """`{layers}{L}.{block}.experts.{E}.{gate_proj, up_proj, down_proj}.{part}`.

    Attributes:
        layers: the prefix of a layer's number. block: between the number and `experts`.
        draft_layers: the prefix of a draft layer's number, counted from 0; None where draft layers
            are numbered on after the others, under the same prefix.
        matrices: names of gate, up and down.
    """

    layers = "model.layers."
    block = "mlp"
    draft_layers: str | None = None
    matrices: Mapping[Projection, str] = {
        "gate": "gate_proj",
        "up": "up_proj",
        "down": "down_proj",
    }

    def declared_format(self, config: Mapping[str, Any], modelopt: Mapping[str, Any] | None) -> str:
        return declared_format(config, modelopt)

    def expert_prefix(
        self, geometry: Geometry, layer: int, expert: int, projection: Projection
    ) -> str:
        start = f"{self.layers}{layer}"
        if self.draft_layers is not None and layer >= geometry.num_layers:
            start = f"{self.draft_layers}{layer - geometry.num_layers}"
        return f"{start}.{self.block}.experts.{expert}.{self.matrices[projection]}"

    def tensor_name(self, prefix: str, suffix: str) -> str:
        return f"{prefix}.{suffix}"

    def parse_expert(self, geometry: Geometry, name: str) -> ExpertTensor | None:
        match = self._pattern.fullmatch(name)
        if match is None:
            return None
        start, number, expert, matrix, suffix = match.groups()
        layer = int(number)
        if start == self.draft_layers:
            layer += geometry.num_layers
        elif self.draft_layers is not None and layer >= geometry.num_layers:
            return None  # these have names of their own
        return ExpertTensor(layer, int(expert), self._projections[matrix], suffix)

    def __init__(self) -> None:
        starts = "|".join(re.escape(of) for of in (self.layers, self.draft_layers) if of)
        matrices = "|".join(self.matrices.values())
        self._pattern = re.compile(
            rf"({starts}){_NUMBER}\.{self.block}\.experts\.{_NUMBER}\.({matrices})\.(\w+)"
        )
        self._projections = {name: projection for projection, name in self.matrices.items()}


class StackedNames(Family):
    """`{layers}{L}.{block}.experts.{gate_up_proj, down_proj}{_part}`: all experts of a layer.

    `experts` has tensors that are none of the weights (biases); `suffixes` tells them apart.

    Attributes:
        layers, block: as in `PerExpertNames`. suffixes: of the weights' tensors; "" for the name
            alone.
    """

    layers = "model.layers."
    block = "mlp"
    suffixes: tuple[str, ...] = ("",)

    def declared_format(self, config: Mapping[str, Any], modelopt: Mapping[str, Any] | None) -> str:
        return declared_format(config, modelopt)

    def expert_prefix(
        self, geometry: Geometry, layer: int, expert: int, projection: Projection
    ) -> str:
        matrix = "down_proj" if projection == "down" else "gate_up_proj"
        return f"{self.layers}{layer}.{self.block}.experts.{matrix}"

    def tensor_name(self, prefix: str, suffix: str) -> str:
        return f"{prefix}_{suffix}" if suffix else prefix

    def parse_expert(self, geometry: Geometry, name: str) -> ExpertTensor | None:
        match = self._pattern.fullmatch(name)
        if match is None or (match[3] or "") not in self.suffixes:
            return None
        projection: Projection = "down" if match[2] == "down" else "gate"
        return ExpertTensor(int(match[1]), None, projection, match[3] or "")

    def __init__(self) -> None:
        self._pattern = re.compile(
            rf"{re.escape(self.layers)}{_NUMBER}\.{self.block}\.experts\."
            r"(gate_up|down)_proj(?:_(\w+))?"
        )
