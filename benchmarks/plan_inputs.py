"""Fits the planner's kernel model to the kernels' result files.

    python benchmarks/plan_inputs.py

Rewrites src/moet/plan/data/kernels.json from bench/results' kernels-h200.json and kernels-cpu.json.

For each precision: time = launch + row · rows + bytes / (fraction · read bandwidth), by least
squares of relative errors; launch and row at least zero, fraction at most one. On the GPU, of
single launches of the decode kernel with BF16 activations.
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from moet.bench.results import read_result
from moet.kernels.cuda.dispatch import DECODE_TOKENS
from moet.plan import measured

RESULTS = Path("bench/results")
TARGET = Path(measured.__file__).parent / "data" / "kernels.json"
PRECISIONS = ("base", "mxfp4", "nvfp4")
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
    cases: dict[str, list[Case]] = {name: [] for name in PRECISIONS}
    for row in result["rows"]:
        single = row["op"] == "decode" and row["tokens"] <= DECODE_TOKENS
        if single and row["activations"] == "bf16" and row["precision"] in PRECISIONS:
            nbytes = row["gbps"] * row["us"] * 1e3
            cases[row["precision"]].append((row["experts_read"], nbytes, row["us"]))
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
    """The best (launch, row, fraction) among all choices of those that are at their bound."""
    count, nbytes, us = np.array(cases).T
    design = np.stack([np.ones_like(us), count, nbytes / (read * 1e3)], axis=1) / us[:, None]
    least = np.array([0.0, 0.0, 1.0])
    fits = []
    for free in product((True, False), repeat=3):
        solution = least.copy()
        kept = np.array(free)
        rest = 1 - design @ np.where(kept, 0, least)
        solution[kept] = np.linalg.lstsq(design[:, kept], rest, rcond=None)[0]
        if (solution >= least).all():
            fits.append(solution)
    best = min(fits, key=lambda solution: float(np.sum((design @ solution - 1) ** 2)))
    launch, row, inverse = best
    return {
        "launch_us": round(float(launch), 2),
        "row_us": round(float(row), 3),
        "fraction": round(float(1 / inverse), 4),
        "worst_error": round(float(np.abs(design @ best - 1).max()), 3),
        "cases": len(cases),
    }


if __name__ == "__main__":
    main()
