"""Fits the planner's kernel model to the kernels' result files.

    python benchmarks/plan_inputs.py

Rewrites src/moet/plan/data/kernels.json from bench/results' kernels-h200.json and kernels-cpu.json.

For each precision: time = launch + row · rows + bytes / (fraction · read bandwidth), by least
squares of relative errors, all three at or above zero.

Where a shape was measured with an earlier layout only, its times are divided by the speed-up that
the present layout has, at as many tokens, on the shape that was measured with both.
"""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from moet.bench.results import read_result
from moet.plan import measured

RESULTS = Path("bench/results")
TARGET = Path(measured.__file__).parent / "data" / "kernels.json"
PRECISIONS = ("base", "mxfp4", "nvfp4")
EARLIER = "an earlier layout"
Case = tuple[float, float, float]  # rows, bytes, µs


def main() -> None:
    content = {"gpu": fit_gpu(), "cpu": fit_cpu()}
    TARGET.write_text(json.dumps(content, indent=1) + "\n")
    for device, entry in content.items():
        for precision, fit in entry["fits"].items():
            print(device, precision, fit)


def fit_gpu() -> dict[str, Any]:
    result = read_result(RESULTS / "kernels-h200.json")
    read = result["environment"]["hbm_read_gbps"]
    now, before = {}, {}
    for row in result["rows"]:
        if row["precision"] in PRECISIONS and row["op"].startswith("decode"):
            measured_with = before if EARLIER in row["op"] else now
            measured_with[row["model"], row["precision"], row["tokens"]] = row
    cases: dict[str, list[Case]] = {name: [] for name in PRECISIONS}
    for (model, precision, tokens), row in {**before, **now}.items():
        us = row["us"]
        if (model, precision, tokens) not in now:
            both = [key for key in now if key in before and key[1:] == (precision, tokens)]
            us *= now[both[0]]["us"] / before[both[0]]["us"]
        cases[precision].append((row["experts_read"], row["gbps"] * row["us"] * 1e3, us))
    return entry(result["environment"]["gpu"], "kernels-h200.json", read, cases)


def fit_cpu() -> dict[str, Any]:
    result = read_result(RESULTS / "kernels-cpu.json")
    read = result["environment"]["read_gbps"]
    cases: dict[str, list[Case]] = {name: [] for name in PRECISIONS}
    for row in result["rows"]:
        cases[row["precision"]].append((row["experts"], row["gbps"] * row["us"] * 1e3, row["us"]))
    return entry(result["environment"]["cpu"], "kernels-cpu.json", read, cases)


def entry(device: str, file: str, read: float, cases: dict[str, list[Case]]) -> dict[str, Any]:
    return {
        "device": device,
        "source": f"bench/results/{file}",
        "read_gb_s": read,
        "fits": {precision: fit(cases[precision], read) for precision in PRECISIONS},
    }


def fit(cases: list[Case], read: float) -> dict[str, float]:
    """The best non-negative (launch, row, per byte), among all choices of those that are zero."""
    table = np.array(cases)
    count, nbytes, us = table.T
    design = np.stack([np.ones_like(us), count, nbytes / (read * 1e3)], axis=1) / us[:, None]
    target = np.ones_like(us)
    best: tuple[float, np.ndarray] | None = None
    for size in (1, 2, 3):
        for kept in combinations(range(3), size):
            if 2 not in kept:
                continue
            solution = np.linalg.lstsq(design[:, kept], target, rcond=None)[0]
            if (solution < 0).any():
                continue
            full = np.zeros(3)
            full[list(kept)] = solution
            error = float(np.sum((design @ full - 1) ** 2))
            if best is None or error < best[0]:
                best = error, full
    assert best is not None
    launch, row, inverse = best[1]
    return {
        "launch_us": round(float(launch), 2),
        "row_us": round(float(row), 3),
        "fraction": round(float(1 / inverse), 4),
        "worst_error": round(float(np.abs(design @ best[1] - 1).max()), 3),
        "cases": len(cases),
    }


if __name__ == "__main__":
    main()
