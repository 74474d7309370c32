"""How fast a checkpoint is packed, and how much memory that takes.

    python benchmarks/packing.py [MODEL=GIB[,GIB …] …]

For each MODEL, a checkpoint directory, and each size, a checkpoint with the model's experts is
written to a temporary directory, its layers repeated until it has so many GiB of them. A process of
its own packs it; peak memory is that process's largest resident set, start_rss_mb what it held
before the checkpoint was opened (Python, torch, numba); the names and places of its tensors take
about 1 kB a tensor, the rest does not depend on the size. The files were just written, so they are
read from the page cache: this measures the packer, not the disk. Writes
bench/results/packing-cpu.json.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from safetensors.torch import save_file

from moet.bench.results import Row, write_result
from moet.checkpoints import Checkpoint
from moet.checkpoints.base import PROJECTIONS
from moet.pack import write_pack
from moet.quantize import QUANTIZERS

RESULT = Path("bench/results/packing-cpu.json")
DEFAULT = "models/nano-moe=0.25,1"
QUANTIZER = "data-free"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("models", nargs="*", metavar="MODEL=GIB[,GIB …]")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--directory", type=Path, help="where to write; default: a temporary one")
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    rows = []
    for argument in options.models or [DEFAULT]:
        model, _, sizes = argument.partition("=")
        for size in map(float, sizes.split(",")):
            with tempfile.TemporaryDirectory(dir=options.directory) as directory:
                rows.append(measure(Path(model), size, options.workers, Path(directory)))
            print(rows[-1], flush=True)
    write_result(options.output, rows)


def measure(model: Path, gib: float, workers: int, directory: Path) -> Row:
    """One row of the result: `model` repeated to `gib` GiB of experts, packed in a new process."""
    repeat_layers(model, directory / "model", gib * 2**30)
    order = [str(directory / "model"), str(directory / "pack"), str(workers)]
    program = "import sys; from benchmarks.packing import pack; pack(*sys.argv[1:])"
    run = subprocess.run(
        [sys.executable, "-c", program, *order],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        cwd=Path(__file__).parents[1],
    )
    return {"model": model.name, **json.loads(run.stdout)}


def repeat_layers(source: Path, target: Path, size: float) -> None:
    """Writes a checkpoint with `size` bytes of experts: those of `source`, layer after layer."""
    target.mkdir()
    with Checkpoint.open(source) as checkpoint:
        geometry, family = checkpoint.geometry, checkpoint.family
        kind = checkpoint.expert_format(geometry.moe_layers[0])
        layers = [of for of in geometry.moe_layers if checkpoint.expert_format(of) == kind]
        first = geometry.moe_layers[0]
        weight_map, done, number = {}, 0, first
        while done < size:
            layer, tensors = layers[number % len(layers)], {}
            for expert in range(geometry.num_experts):
                for projection in PROJECTIONS:
                    old = family.expert_prefix(geometry, layer, expert, projection)
                    new = family.expert_prefix(geometry, number, expert, projection)
                    for ref in checkpoint.locate(layer, expert)[projection].values():
                        name = new + ref.name.removeprefix(old)
                        tensors[name] = checkpoint.read_tensor(ref.name)
                        done += ref.nbytes
            file = f"layer-{number:05d}.safetensors"
            save_file(tensors, target / file)
            weight_map |= dict.fromkeys(tensors, file)
            number += 1
        config = checkpoint.config | {"num_hidden_layers": number, "num_nextn_predict_layers": 0}
    (target / "config.json").write_text(json.dumps(config))
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def pack(model: str, out: str, workers: str) -> None:
    """In the process that is measured: packs, and prints the row as JSON."""
    start = peak_rss()
    with Checkpoint.open(model) as checkpoint:
        report = write_pack(
            checkpoint, out, quantizer=QUANTIZERS[QUANTIZER](), workers=int(workers)
        )
        geometry = checkpoint.geometry
        experts = len(geometry.moe_layers) * geometry.num_experts
        weights = experts * len(PROJECTIONS) * geometry.hidden * geometry.intermediate
        row = {
            "format": checkpoint.expert_format(geometry.moe_layers[0]),
            "quantizer": QUANTIZER,
            "checkpoint_gb": report.checkpoint_bytes / 1e9,
            "pack_gb": report.pack_bytes / 1e9,
            "layers": report.layers,
            "seconds": report.seconds,
            "gb_per_s": report.checkpoint_bytes / report.seconds / 1e9,
            "weights_per_s": weights / report.seconds,
            "start_rss_mb": start,
            "peak_rss_mb": peak_rss(),
            "workers": int(workers),
        }
    print(
        json.dumps(
            {
                key: round(value, 4) if isinstance(value, float) else value
                for key, value in row.items()
            }
        )
    )


def peak_rss() -> float:
    """The largest resident set of this process so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3  # Linux counts in KiB


if __name__ == "__main__":
    main()
