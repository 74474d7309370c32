"""The planner's measured and assumed inputs, from the data files beside this module."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from moet.formats.layout import Precision
from moet.plan.ranges import Range

_DATA = files("moet.plan") / "data"


@dataclass(frozen=True)
class Input:
    """One input: its range and where it comes from."""

    name: str
    value: Range
    source: str


@dataclass(frozen=True)
class KernelModel:
    """Time of one layer's experts when all rows are in the device's memory:

        launch + row · rows + bytes / (fraction · read bandwidth)

    launch_us and row_us in µs; fraction of the read bandwidth, 0 … 1; worst_error: the largest
    relative error of the fit over the measured cases.
    """

    device: str
    launch_us: float
    row_us: float
    fraction: float
    worst_error: float
    source: str

    def us(self, rows: float, nbytes: float, read_bandwidth: float) -> float:
        """µs for `rows` rows of `nbytes` in all at a read bandwidth in bytes/s."""
        return self.launch_us + self.row_us * rows + nbytes / (self.fraction * read_bandwidth) * 1e6


@cache
def _table(name: str) -> dict[str, Any]:
    text = (_DATA / name).read_text()
    content: dict[str, Any] = json.loads(text) if name.endswith(".json") else yaml.safe_load(text)
    return content


def _input(name: str, entry: dict[str, Any]) -> Input:
    return Input(name, Range(entry["low"], entry["typical"], entry["high"]), entry["source"])


def assumption(name: str) -> Range:
    """The range of an input of `assumptions.yaml`."""
    return _input(name, _table("assumptions.yaml")[name]).value


def routing_spread(architecture: str) -> Range:
    """The spread of a model's routing (see `plan.routing`)."""
    table = _table("assumptions.yaml")["routing_spread"]
    return _input("routing_spread", table.get(architecture, table["default"])).value


def inputs() -> list[Input]:
    """Every input with its source, for the docs."""
    found = []
    for name, entry in _table("assumptions.yaml").items():
        if name == "routing_spread":
            found += [_input(f"{name}, {model}", value) for model, value in entry.items()]
        else:
            found.append(_input(name, entry))
    return found


def kernel_model(device: str, precision: Precision) -> KernelModel:
    """The expert kernels' model for "gpu" or "cpu" and a precision."""
    entry = _table("kernels.json")[device]
    fit = entry["fits"][precision.value]
    return KernelModel(
        entry["device"],
        fit["launch_us"],
        fit["row_us"],
        fit["fraction"],
        fit["worst_error"],
        entry["source"],
    )


def gpu_table() -> dict[str, dict[str, Any]]:
    """Product → what `hardware.yaml` says of it."""
    table: dict[str, dict[str, Any]] = _table("hardware.yaml")["gpus"]
    return table
