"""How long a start takes to bring a pack's rows into memory, beside what the disk can do.

    python -m benchmarks.booting [--gib 1] [--directory PLACE] [--threads N]

A pack of rows as large as real ones (4096 × 2048, 2 bits: 6.75 MiB) is written to PLACE and dropped
from the page cache. Then it is read from disk, cold each time: plainly (`read`, 8 MiB at a time,
each thread another part of every file), and by the tiers' own preload, checksums included, into
memory that is there already (pinning it costs `pinning` of ensure-h200.json on top): the best of
three. Writes bench/results/booting-cpu.json.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.reading import REPEATS, cold, pack, read_plainly, write_model
from moet.bench.results import Row, write_result
from moet.formats.layout import Precision
from moet.pack import Pack, PackRowSource
from moet.residency.tiers import TieredResidency, TierOptions, TierSizes
from tests.residency.tiers.threads import ThreadDevice

RESULT = Path("bench/results/booting-cpu.json")
BASE = Precision.BASE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gib", type=float, default=1.0, help="of the checkpoint")
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--directory", type=Path, help="where to write; default: a temporary one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as place:
        write_model(Path(place) / "model", options.gib)
        path = Path(place) / "pack"
        pack(Path(place) / "model", path, 2)
        files = [layer.path for layer in Pack.open(path).layers.values()]
        ways: dict[str, Callable[[], int]] = {
            "plain read": lambda: plainly(files, options.threads),
            "a start": lambda: start(path, options.threads),
        }
        rows: list[Row] = []
        for name, run in ways.items():
            rows.append({"way": name, "gb_per_s": 0.0})
            for _ in range(REPEATS):
                read: list[int] = []
                seconds = cold(files, lambda run=run, read=read: read.append(run()))
                rate = round(read[0] / seconds / 1e9, 3)
                rows[-1]["gb_per_s"] = max(rate, rows[-1]["gb_per_s"])
            rows[-1] |= {"gib": round(read[0] / 2**30, 2), "threads": options.threads}
            print(rows[-1], flush=True)
        rows[1]["time_over_disk"] = round(rows[0]["gb_per_s"] / rows[1]["gb_per_s"], 2)
    write_result(RESULT, rows)


def plainly(files: list[Path], threads: int) -> int:
    """Bytes that were read."""
    read_plainly(files, threads)
    return sum(file.stat().st_size for file in files)


def start(path: Path, threads: int) -> int:
    """Bytes of the rows that were read and checked."""
    with PackRowSource(Pack.open(path)) as source:
        owned = np.ones((len(source.layers), source.num_experts), np.bool_)
        row = source.layouts[BASE].row_bytes
        device = ThreadDevice(owned.shape, {(BASE, 0, 0): b""}, seed=0)
        sizes = TierSizes(0, owned.size + 32)
        tiers = TieredResidency(
            source, source.layers, {BASE: owned}, {BASE: sizes}, device,
            TierOptions(io_threads=threads),
        )  # fmt: skip
        with tiers:
            tiers.start()
            tiers.preload()
            read = tiers.metrics().disk_reads
        assert read == owned.size
        return read * row


if __name__ == "__main__":
    main()
