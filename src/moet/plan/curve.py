"""Tokens/s over the size of the pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from moet.errors import ConfigError
from moet.plan.machine import GIB
from moet.plan.plan import Plan
from moet.plan.ranges import Range
from moet.plan.speed import Case, predict_decode

_POINTS = 60


@dataclass(frozen=True)
class Point:
    """A pool of `gib` GiB on each GPU, and the predicted tokens/s with it."""

    gib: float
    decode: Range


def curve(plan: Plan, points: int = _POINTS) -> list[Point]:
    """Decoding over pools from none to all rows; what the pool does not hold is where the plan's
    memory has room for it."""
    found = []
    place = plan.placement
    for pool in np.unique(np.linspace(0, place.rows, points).round().astype(int)):
        arena = 0
        if plan.machine.gpu is not None:
            arena = min(place.rows - int(pool), plan.arena_rows())
        at = replace(place, pool=int(pool), arena=arena, disk=place.rows - int(pool) - arena)
        case = Case(plan.inventory, plan.machine, plan.workload, plan.need, at)
        found.append(Point(int(pool) * plan.need.row / GIB, predict_decode(case).rate))
    return found


def plot(plan: Plan, points: Sequence[Point], path: Path) -> None:
    """Draws the curve as a PNG. Raises ConfigError when it cannot be drawn or written."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("--plot needs matplotlib.", "Run: pip install matplotlib") from None
    figure = Figure(figsize=(7, 4.2), dpi=130, layout="constrained")
    axes = figure.add_subplot()
    gib = [point.gib for point in points]
    low = [point.decode.low for point in points]
    high = [point.decode.high for point in points]
    axes.fill_between(gib, low, high, alpha=0.25, linewidth=0, label="slow to fast inputs")
    axes.plot(gib, [point.decode.typical for point in points], label="typical inputs")
    here = plan.placement.pool * plan.need.row / GIB
    axes.axvline(here, color="black", linestyle=":", label=f"this plan: {here:.1f} GiB")
    tier = "GPU memory for experts" if plan.machine.gpu else "RAM for experts"
    axes.set_xlabel(f"{tier}, GiB" + (" a GPU" if plan.machine.count > 1 else ""))
    axes.set_ylabel(f"tokens/s, {plan.workload.streams} stream(s)")
    axes.set_title(f"{plan.model} on {plan.machine.name}: predicted decoding")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(loc="best")
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise ConfigError(f"--plot {path}: cannot be written: {error.strerror}.") from None
