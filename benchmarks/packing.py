"""How fast a checkpoint is packed, and how much memory that takes.

    python -m benchmarks.packing [MODEL=GIB[,GIB …] …] [--device cuda] [--cold]

MODEL is a checkpoint directory, whose experts' layers are repeated until there are so many GiB of
them, or FAMILY:FORMAT:HIDDENxINTERMEDIATE, experts of that size drawn at random. The checkpoint is
written to a temporary directory, and a process of its own packs it; peak memory is that process's
largest resident set, start_rss_mb what it held before the checkpoint was opened (Python, torch,
numba); the names and places of its tensors take about 1 kB a tensor, the rest does not depend on
the size. The files were just written, so they are read from the page cache: this measures the
packer, not the disk. With --cold they are dropped from the cache first, and read_gb_per_s is what
as many threads read from the same files, dropped as well, without doing anything with it. The pack
goes to the disk that the checkpoint is on; with --also it is made once more elsewhere, such as in
memory, so that what the disk reads is told from what it writes. seconds is the run of
`moet.pack.write_pack`, all syncs included; start_seconds what the process took before it: Python's
start, imports, CUDA's context and loading the kernels. Writes bench/results/packing-cpu.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import psutil
import torch
from safetensors.torch import save_file

from moet.bench.results import Row, write_result
from moet.checkpoints import Checkpoint
from moet.checkpoints.base import PROJECTIONS
from moet.cli.device import Device, row_encoder
from moet.pack import write_pack
from moet.quantize import QUANTIZERS
from tests.fixtures.checkpoints import write_experts

RESULT = Path("bench/results/packing-cpu.json")
DEFAULT = "models/nano-moe=0.25,1"
QUANTIZER = "data-free"
EXPERTS = 64  # a layer, of those drawn at random
PIECE = 8 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("models", nargs="*", metavar="MODEL=GIB[,GIB …]")
    parser.add_argument("--workers", type=int, default=min(len(os.sched_getaffinity(0)), 16))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--cold", action="store_true", help="read from the disk, not its cache")
    parser.add_argument("--also", type=Path, help="where each pack is made a second time")
    parser.add_argument("--directory", type=Path, help="where to write; default: a temporary one")
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    gpu = {"gpu": torch.cuda.get_device_name()} if options.device == "cuda" else None
    rows = []
    for argument in options.models or [DEFAULT]:
        model, _, sizes = argument.partition("=")
        for size in map(float, sizes.split(",")):
            with tempfile.TemporaryDirectory(dir=options.directory) as directory:
                for row in measure(model, size, options, Path(directory)):
                    rows.append(row)
                    print(row, flush=True)
                    write_result(options.output, rows, gpu)


def measure(model: str, gib: float, options: argparse.Namespace, directory: Path) -> Iterator[Row]:
    """Rows of the result: `gib` GiB of `model`'s experts, packed in new processes."""
    source = directory / "model"
    if ":" in model:
        family, format, widths = model.split(":")
        hidden, intermediate = map(int, widths.split("x"))
        write_experts(
            source, family, format, hidden=hidden, intermediate=intermediate, experts=EXPERTS,
            size=gib * 2**30,
        )  # fmt: skip
    else:
        repeat_layers(Path(model), source, gib * 2**30)
    for place in (directory, options.also):
        if place is None:
            continue
        row: Row = {"model": Path(model).name, "packs": place_of(place, source)}
        if options.cold:
            drop_cache(source)
            row["read_gb_per_s"] = read_rate(source, options.workers)
            drop_cache(source)
        with tempfile.TemporaryDirectory(dir=place) as packs:
            yield row | packed(source, Path(packs) / "pack", options.workers, options.device)


def place_of(packs: Path, source: Path) -> str:
    """Whether packs go where the checkpoint is."""
    return "same disk" if packs.stat().st_dev == source.stat().st_dev else "elsewhere"


def packed(model: Path, pack: Path, workers: int, device: str) -> Row:
    order = [str(model), str(pack), str(workers), device]
    program = "import sys; from benchmarks.packing import pack; pack(*sys.argv[1:])"
    run = subprocess.run(
        [sys.executable, "-c", program, *order],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        cwd=Path(__file__).parents[1],
    )
    row: Row = json.loads(run.stdout)
    return row


def drop_cache(directory: Path) -> None:
    """Takes a directory's files out of the page cache."""
    for path in directory.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_rate(directory: Path, threads: int) -> float:
    """GB/s at which `threads` read all files of a directory, in pieces of 8 MiB."""
    paths = list(directory.iterdir())
    pieces = [(p, at) for p in paths for at in range(0, p.stat().st_size, PIECE)]

    def read(piece: tuple[Path, int]) -> int:
        with piece[0].open("rb", buffering=0) as file:
            return len(os.pread(file.fileno(), PIECE, piece[1]))

    started = time.monotonic()
    with ThreadPoolExecutor(threads) as pool:
        done = sum(pool.map(read, pieces))
    return round(done / (time.monotonic() - started) / 1e9, 3)


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


def pack(model: str, out: str, workers: str, device: str) -> None:
    """In the process that is measured: packs, and prints the row as JSON."""
    with ExitStack() as stack:
        encoder = stack.enter_context(row_encoder(Device(device)))
        start, start_seconds = peak_rss(), time.time() - psutil.Process().create_time()
        checkpoint = stack.enter_context(Checkpoint.open(model))
        report = write_pack(
            checkpoint,
            out,
            quantizer=QUANTIZERS[QUANTIZER](),
            workers=int(workers),
            encoder=encoder,
        )
        geometry = checkpoint.geometry
        experts = len(geometry.moe_layers) * geometry.num_experts
        weights = experts * len(PROJECTIONS) * geometry.hidden * geometry.intermediate
        row = {
            "format": checkpoint.expert_format(geometry.moe_layers[0]),
            "quantizer": QUANTIZER,
            "device": device,
            "checkpoint_gb": report.checkpoint_bytes / 1e9,
            "pack_gb": report.pack_bytes / 1e9,
            "layers": report.layers,
            "seconds": report.seconds,
            "start_seconds": start_seconds,
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
    """The largest resident set of this program so far, in MB."""
    # Not getrusage's: that is at least what the parent had when it started this process.
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024 / 1e6


if __name__ == "__main__":
    main()
