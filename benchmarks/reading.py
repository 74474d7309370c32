"""How much of the disk's read bandwidth the packer's reading gets.

    python benchmarks/reading.py [--gib 2] [--directory PLACE] [--workers N]

A checkpoint of experts as large as real ones (NVFP4, 4096 × 2048: 14 MB) is written to PLACE and
dropped from the page cache. Then it is read from disk, cold each time: plainly (`read`, 8 MiB at a
time, one thread a worker, each another part of every file), and as packing reads it (`schedule`,
`read_expert` by worker threads), without decoding: the best of three. `packing` is all of it, once:
read, decode, quantize at level 0, encode, write. Writes bench/results/reading-cpu.json.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from moet.bench.results import Row, write_result
from moet.checkpoints import Checkpoint
from moet.pack import write_pack
from moet.pack.schedule import schedule
from moet.quantize import QUANTIZERS

RESULT = Path("bench/results/reading-cpu.json")
HIDDEN, INTERMEDIATE, EXPERTS = 4096, 2048, 16
CHUNK = 8 << 20
REPEATS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--directory", type=Path, help="where to write; default: a temporary one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as place:
        path = Path(place) / "model"
        write_model(path, options.gib)
        files = sorted(path.glob("*.safetensors"))
        size = sum(file.stat().st_size for file in files)
        ways: dict[str, Callable[[], None]] = {
            "plain read": lambda: read_plainly(files, options.workers),
            "as packing reads": lambda: read_experts(path, options.workers),
        }
        rows: list[Row] = []
        for name, run in ways.items():
            rates = [size / cold(files, run) / 1e9 for _ in range(REPEATS)]
            rows.append({"way": name, "gb_per_s": round(max(rates), 3)})
            print(rows[-1], flush=True)
        seconds = cold(files, lambda: pack(path, Path(place) / "pack", options.workers))
        rows.append({"way": "packing", "gb_per_s": round(size / seconds / 1e9, 3)})
        print(rows[-1], flush=True)
    for row in rows:
        row |= {"gib": round(size / 2**30, 2), "workers": options.workers}
    write_result(RESULT, rows)


def write_model(path: Path, gib: float) -> None:
    """A Qwen3-MoE checkpoint of random NVFP4 experts, a file a layer; nothing else in it."""
    path.mkdir()
    rng = np.random.default_rng(0)
    weights = HIDDEN * INTERMEDIATE
    layers = max(1, round(gib * 2**30 / (EXPERTS * 3 * weights * 9 / 16)))
    table = {}
    for layer in range(layers):
        tensors = {}
        for expert in range(EXPERTS):
            for which in ("gate", "up", "down"):
                rows, cols = (HIDDEN, INTERMEDIATE) if which == "down" else (INTERMEDIATE, HIDDEN)
                prefix = f"model.layers.{layer}.mlp.experts.{expert}.{which}_proj"
                codes = torch.from_numpy(rng.integers(0, 256, (rows, cols // 2), np.uint8))
                scale = torch.from_numpy(rng.integers(40, 80, (rows, cols // 16), np.uint8))
                tensors[f"{prefix}.weight"] = codes
                tensors[f"{prefix}.weight_scale"] = scale.view(torch.float8_e4m3fn)
                tensors[f"{prefix}.weight_scale_2"] = torch.tensor(1e-3)
        file = f"model-{layer:05d}.safetensors"
        save_file(tensors, path / file)
        table |= dict.fromkeys(tensors, file)
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": HIDDEN,
        "moe_intermediate_size": INTERMEDIATE,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 8,
        "num_hidden_layers": layers,
        "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    }
    (path / "config.json").write_text(json.dumps(config))
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))


def cold(files: list[Path], run: Callable[[], None]) -> float:
    """Seconds that `run` takes when none of `files` is in the page cache."""
    for file in files:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def read_plainly(files: list[Path], workers: int) -> None:
    def part(number: int) -> None:
        buffer = bytearray(CHUNK)
        for file in files:
            size = file.stat().st_size
            with file.open("rb", buffering=0) as opened:
                for start in range(size * number // workers, size * (number + 1) // workers, CHUNK):
                    opened.seek(start)
                    opened.readinto(buffer)

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(part, range(workers)))


def read_experts(path: Path, workers: int) -> None:
    with Checkpoint.open(path) as checkpoint, ThreadPoolExecutor(workers) as pool:
        for step in schedule(checkpoint, checkpoint.geometry.moe_layers):
            list(pool.map(lambda of: checkpoint.read_expert(*of) and None, step.experts))


def pack(path: Path, out: Path, workers: int) -> None:
    with Checkpoint.open(path) as checkpoint:
        write_pack(checkpoint, out, quantizer=QUANTIZERS["data-free"](), workers=workers)


if __name__ == "__main__":
    main()
