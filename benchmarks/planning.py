"""Plans the headline models on the hardware of the published figures.

    python benchmarks/planning.py [--recipes]

Writes bench/results/plans.json (one row a model × hardware: what was planned, beside the figures
that are published for another system on it) and bench/results/planning.json (time and memory of
planning full-size indexes). With --recipes it rewrites src/moet/recipes/*.yaml from the plans.
The models are their headers, made up from the published geometry (tests/plan/headline.py).
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from moet.bench.results import Row, write_result
from moet.plan.inventory import take_inventory
from moet.plan.machine import GIB, Machine, host_bandwidth, parse_disk, parse_gpus
from moet.plan.model_files import ModelFiles, open_model
from moet.plan.plan import Plan, default_workload, make_plan
from moet.plan.recipe import recipe_of
from moet.recipes import recipe as recipes
from tests.plan.headline import HEADLINE

RESULTS = Path("bench/results")
HUB = {
    "DeepSeek-V4-Flash": "deepseek-ai/DeepSeek-V4-Flash",
    "GLM-5.2-NVFP4": "nvidia/GLM-5.2-NVFP4",
    "Kimi-K2.7-Code-NVFP4": "nvidia/Kimi-K2.7-Code-NVFP4",
}
HARDWARE = [
    ("RTX 4090", 64), ("RTX 5090", 64), ("RTX PRO 6000", 128), ("RTX PRO 6000×2", 256),
    ("RTX PRO 6000×4", 256), ("H200", 256),
]  # fmt: skip
PROGRAM = """
import resource, sys
from moet.cli.main import app
try:
    app(sys.argv[1:])
finally:
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(used.ru_utime + used.ru_stime, used.ru_maxrss, file=sys.stderr)
"""
# Published by the vLLM-Moet project for its own engine: decoding and prefill, tokens/s of a single
# stream, and with what. Its decoding drafts with MTP where that is said; these plans do not.
PUBLISHED: dict[tuple[str, str], tuple[float, float | None, str]] = {
    ("DeepSeek-V4-Flash", "RTX 5090"): (31, 470, "14 GiB pool, NVMe, MTP"),
    ("DeepSeek-V4-Flash", "RTX PRO 6000"): (161.2, 5340, "resident, MTP-2"),
    ("DeepSeek-V4-Flash", "RTX PRO 6000×2"): (209.6, 5791, "resident, MTP-2"),
    ("GLM-5.2-NVFP4", "RTX PRO 6000×2"): (28.3, None, "46 GiB pool, MTP-2"),
    ("GLM-5.2-NVFP4", "RTX PRO 6000×4"): (56, 2500, "resident, no MTP (105 with MTP-2)"),
    ("Kimi-K2.7-Code-NVFP4", "RTX PRO 6000×2"): (14.4, None, "52 GiB pool"),
    ("Kimi-K2.7-Code-NVFP4", "RTX PRO 6000×4"): (51, 2448, "resident, no MTP"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--recipes", action="store_true", help="rewrite the shipped recipes")
    options = parser.parse_args()
    plans: list[Row] = []
    timings: list[Row] = []
    with tempfile.TemporaryDirectory() as place:
        for name, write in HEADLINE.items():
            path = write(Path(place) / name)
            files = replace(open_model(str(path)), name=HUB[name])
            inventory = take_inventory(files)
            for gpu, ram in HARDWARE:
                product, count = parse_gpus(gpu)
                machine = Machine(
                    product, count, ram * GIB, host_bandwidth(16), 16, parse_disk("4TB")
                )
                workload = replace(default_workload(inventory, machine), kv_dtype="fp8")
                plan = make_plan(files, inventory, machine, workload)
                plans.append(row(name, gpu, ram, plan))
                if options.recipes:
                    write_recipe(name, gpu, plan, files)
            timings.append(measure(name, path))
    write_result(RESULTS / "plans.json", plans)
    write_result(RESULTS / "planning.json", timings)


def row(name: str, gpu: str, ram: int, plan: Plan) -> Row:
    found: dict[str, Any] = {
        "model": name,
        "hardware": gpu,
        "ram_gib": ram,
        "base_gib": round(plan.base_bytes() / GIB, 2),
        "row_mib": round(plan.need.row / 2**20, 3),
        "dense_gib": round(sum(plan.need.weights.values()) / GIB, 2),
        "kv_bytes_per_token": round(plan.need.kv_cache.per_token, 1),
        "pool": round(plan.placement.pool_coverage, 3),
        "arena": round(plan.placement.arena / plan.placement.rows, 3),
        "disk": round(plan.placement.disk / plan.placement.rows, 3),
        "max_context": plan.max_context,
        "missing": " ".join(plan.missing),
    }
    for kind, prediction in (("decode", plan.decode), ("prefill", plan.prefill)):
        if prediction is not None:
            for end in ("low", "typical", "high"):
                found[f"{kind}_{end}"] = float(f"{getattr(prediction.rate, end):.3g}")
            found[f"{kind}_limit"] = prediction.limit
    if (name, gpu) in PUBLISHED:
        decode, prefill, how = PUBLISHED[name, gpu]
        found |= {"published_decode": decode, "published_prefill": prefill, "published_with": how}
    return found


def write_recipe(name: str, gpu: str, plan: Plan, files: ModelFiles) -> None:
    recipe = recipe_of(plan, files.name)
    if recipe is None:
        return
    slug = re.sub(r"[^a-z0-9.]+", "-", f"{name} {gpu.replace('×', ' x')}".lower())
    path = Path(recipes.__file__).parent / f"{slug}.yaml"
    path.write_text(recipe.to_yaml())


def measure(name: str, path: Path) -> Row:
    """Seconds and peak memory of `moet plan` in a process of its own, importing included."""
    arguments = ["plan", str(path), "--gpu", "H200", "--ram", "256GiB", "--json"]
    # Through a shell: a process inherits the peak of the one that started it, which is this one.
    command = ["sh", "-c", '"$@"; exit $?', "sh", sys.executable, "-c", PROGRAM, *arguments]
    best, cpu, peak = float("inf"), float("inf"), 0
    for _ in range(3):
        start = time.monotonic()
        run = subprocess.run(command, check=True, capture_output=True, text=True)
        best = min(best, time.monotonic() - start)
        *_, used, rss = run.stderr.split()
        cpu, peak = min(cpu, float(used)), max(peak, int(rss) * 1024)
    files = open_model(str(path))
    start = time.monotonic()
    tensors = take_inventory(files).tensors
    alone = time.monotonic() - start
    return {
        "model": name,
        "tensors": tensors,
        "seconds": round(best, 2),
        "cpu_seconds": round(cpu, 2),
        "header_seconds": round(alone, 2),
        "peak_rss_mb": round(peak / 1e6),
    }


if __name__ == "__main__":
    main()
