"""A recorded routing trace: which experts each step used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from moet.errors import ConfigError
from moet.residency.metrics import Phase

_VERSION = "1"

# What one step used: by layer index, expert ids, each once.
Routing = Sequence[tuple[int, Sequence[int]]]


@dataclass(frozen=True)
class RoutingTrace:
    """One line for each (step, layer, expert) that was used, in the order of steps and layers.

    layers: the model's indices. num_experts: of a layer. row_bytes: of a row as served.
    prefill: bool [steps], steps that are a scan of a prompt. step, layer (index), expert:
    int32 [lines].
    """

    layers: tuple[int, ...]
    num_experts: int
    row_bytes: int
    prefill: NDArray[np.bool_]
    step: NDArray[np.int32]
    layer: NDArray[np.int32]
    expert: NDArray[np.int32]

    @classmethod
    def from_steps(
        cls,
        layers: Sequence[int],
        num_experts: int,
        row_bytes: int,
        steps: Sequence[tuple[Phase, Routing]],
    ) -> RoutingTrace:
        """The trace of steps given one by one, each with its layers in the order they ran."""
        lines = [
            (number, layer, expert)
            for number, (_, routing) in enumerate(steps)
            for layer, experts in routing
            for expert in experts
        ]
        columns = np.array(lines, np.int32).reshape(-1, 3).T.copy()
        prefill = np.array([phase == Phase.SCAN for phase, _ in steps], np.bool_)
        return cls(tuple(layers), num_experts, row_bytes, prefill, *columns)

    @property
    def steps(self) -> int:
        return len(self.prefill)

    @property
    def layer_rows(self) -> int:
        """The most rows of a layer that a step uses."""
        pairs = self.step.astype(np.int64) * len(self.layers) + self.layer
        return int(np.unique(pairs, return_counts=True)[1].max(initial=0))

    def use(self, steps: int) -> NDArray[np.int64]:
        """How many of the first decode steps, up to `steps` in all, used each row: int64
        [layers, experts]."""
        counts = np.zeros((len(self.layers), self.num_experts), np.int64)
        lines = (self.step < steps) & ~self.prefill[self.step]
        np.add.at(counts, (self.layer[lines], self.expert[lines]), 1)
        return counts

    def replay(self, first: int = 0) -> Iterator[tuple[Phase, list[tuple[int, list[int]]]]]:
        """The steps from `first` on, as `from_steps` takes them."""
        begin = np.searchsorted(self.step, np.arange(self.steps + 1))
        for number in range(first, self.steps):
            lines = slice(begin[number], begin[number + 1])
            layer, expert = self.layer[lines], self.expert[lines]
            cuts = np.flatnonzero(np.diff(layer)) + 1
            routing = [
                (int(part[0]), ids.tolist())
                for part, ids in zip(np.split(layer, cuts), np.split(expert, cuts), strict=True)
                if part.size
            ]
            yield Phase.SCAN if self.prefill[number] else Phase.DECODE, routing

    def save(self, path: Path) -> None:
        """Writes a safetensors file, at once or not at all. Raises OSError."""
        metadata = {
            "moet_trace": _VERSION,
            "layers": ",".join(map(str, self.layers)),
            "num_experts": str(self.num_experts),
            "row_bytes": str(self.row_bytes),
        }
        tensors = {name: getattr(self, name) for name in ("prefill", "step", "layer", "expert")}
        unfinished = path.with_name(f"{path.name}.part")
        try:
            save_file(tensors, unfinished, metadata)
        except SafetensorError as error:
            raise OSError(str(error)) from None
        unfinished.replace(path)

    @classmethod
    def load(cls, path: Path) -> RoutingTrace:
        """Raises ConfigError, naming the file, for what is not a trace."""
        try:
            with safe_open(path, "np") as file:
                metadata = file.metadata() or {}
                if metadata.get("moet_trace") != _VERSION:
                    raise ConfigError(f"{path} is no routing trace of version {_VERSION}.")
                trace = cls(
                    tuple(map(int, metadata["layers"].split(","))),
                    int(metadata["num_experts"]),
                    int(metadata["row_bytes"]),
                    *(file.get_tensor(name) for name in ("prefill", "step", "layer", "expert")),
                )
        except FileNotFoundError:
            raise ConfigError(f"{path}: there is no such file.") from None
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read as a routing trace: {error}.") from None
        if problem := trace._problem():
            raise ConfigError(f"{path} is damaged: {problem}.")
        return trace

    def _problem(self) -> str:
        columns = (self.step, self.layer, self.expert)
        limits = (self.steps, len(self.layers), self.num_experts)
        if self.prefill.dtype != np.bool_ or self.prefill.ndim != 1 or self.row_bytes < 1:
            return "its steps are not flags, or its rows have no size"
        if any(c.dtype != np.int32 or c.shape != (self.step.size,) for c in columns):
            return "its columns are not int32 of one length"
        for column, limit in zip(columns, limits, strict=True):
            if column.size and not 0 <= int(column.min()) <= int(column.max()) < limit:
                return f"a number is not between 0 and {limit - 1}"
        order = np.lexsort(columns[::-1])
        line = (self.step.astype(np.int64) * limits[1] + self.layer) * limits[2] + self.expert
        if (np.diff(self.step) < 0).any() or (np.diff(line[order]) == 0).any():
            return "its lines are out of order or twice there"
        return ""
