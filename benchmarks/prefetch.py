"""Times the hash-routed layers of a step, their rows read ahead or not.

    PYTHONPATH=src:. python -m benchmarks.prefetch --file ROWS --out RESULT

Three layers of 256 experts, top-6, rows of 6.75 MiB (DeepSeek-V4-Flash's first layers); random
tokens, each with experts of its own in each layer. With a GPU, its tiers, in a CUDA graph, and
115 µs of other work before each layer; without, the CPU's manager, and 2 ms.

in_memory: percent of the rows that have room there. read: from the disk, past the page cache, or
from the page cache. ms: of these layers, mean; ms_ahead: read ahead. Steps of both take turns, with
tokens drawn alike. ROWS, 1 GB, is made and deleted.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from moet.bench.results import Row, write_result
from moet.formats.layout import Precision
from moet.pack.dummy import DummyRowSource
from moet.residency.manager import ResidencyManager
from moet.residency.tiers import TieredResidency, TierOptions, TierSizes

LAYERS, EXPERTS, TOP_K, VOCABULARY = 3, 256, 6, 8192
BASE = Precision.BASE
GEOMETRY: Any = SimpleNamespace(
    moe_layers=tuple(range(LAYERS)), num_experts=EXPERTS, hidden=4096, intermediate=2048
)
FILE_ROWS = 144
IN_MEMORY, STREAMS = (10, 50, 90), (1, 8)
SECONDS = 6.0  # of a case
CLOCK_MHZ = 1900  # about, of an H200: for `torch.cuda._sleep`

Step = Callable[[NDArray[np.int64], bool], None]
"""Runs a step of these tokens, its rows read ahead or not."""


def tables() -> list[NDArray[np.int32]]:
    """Of each layer, int32 [VOCABULARY, TOP_K]."""
    rng = np.random.default_rng(0)
    return [
        rng.random((VOCABULARY, EXPERTS)).argpartition(TOP_K)[:, :TOP_K].astype(np.int32)
        for _ in range(LAYERS)
    ]


@contextmanager
def on_cpu(source: DummyRowSource, rows: int, streams: int) -> Iterator[tuple[Step, Any]]:
    precision = {layer: [BASE] * EXPERTS for layer in range(LAYERS)}
    of = tables()
    with ResidencyManager(source, precision, {BASE: rows}) as manager:

        def step(tokens: NDArray[np.int64], ahead: bool) -> None:
            experts = {layer: np.unique(of[layer][tokens]) for layer in range(LAYERS)}
            if ahead:
                manager.prefetch(experts)
            for layer, chosen in experts.items():
                time.sleep(2e-3)
                with manager.lease(layer, decode=chosen, scan=[]) as lease:
                    for _ in lease:
                        pass

        yield step, manager


@contextmanager
def on_gpu(source: DummyRowSource, rows: int, streams: int) -> Iterator[tuple[Step, Any]]:
    from moet.residency.cuda import CudaTierDevice

    cuda, slots = torch.device("cuda"), 8
    row_bytes = source.layouts[BASE].row_bytes
    code = np.zeros((LAYERS, EXPERTS), np.uint8)
    device = CudaTierDevice(code, {BASE: row_bytes}, TOP_K, cuda, decode_tokens=64)
    of = [torch.from_numpy(table).cuda() for table in tables()]
    device.foresee(dict(enumerate(of)))
    options = TierOptions(layer_rows=min(EXPERTS, TOP_K * streams))
    with TieredResidency(
        source, range(LAYERS), {BASE: code == 0}, {BASE: TierSizes(slots, rows - slots)}, device,
        options,
    ) as manager:  # fmt: skip
        manager.start()
        manager.preload()
        tokens_of = torch.zeros(streams, dtype=torch.int64, device="cuda")

        def launch(ahead: bool) -> None:
            if ahead:
                device.ahead(tokens_of)
            for layer, table in enumerate(of):
                torch.cuda._sleep(115 * CLOCK_MHZ)
                device.ensure(layer, table[tokens_of].contiguous())
                torch.cuda._sleep(23 * CLOCK_MHZ)
            device.finish()

        graphs = {}
        for ahead in (False, True):
            launch(ahead)
            torch.cuda.synchronize()
            with manager.quiet():
                graphs[ahead] = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graphs[ahead]):
                    launch(ahead)

        def step(tokens: NDArray[np.int64], ahead: bool) -> None:
            tokens_of.copy_(torch.from_numpy(tokens))
            graphs[ahead].replay()
            torch.cuda.synchronize()

        yield step, manager
        assert not device.failed_steps()


def measure(source: DummyRowSource, in_memory: int, streams: int) -> Row:
    total = LAYERS * EXPERTS
    rows = max(total * in_memory // 100, min(EXPERTS, TOP_K * streams) + 26)
    rng = np.random.default_rng(streams)
    made = on_gpu if torch.cuda.is_available() else on_cpu
    seconds: dict[bool, list[float]] = {False: [], True: []}
    with made(source, rows, streams) as (step, manager):

        def draw() -> NDArray[np.int64]:
            return rng.integers(0, VOCABULARY, streams)

        while manager.metrics().evictions < 2 * streams:
            step(draw(), False)
        before = manager.metrics()
        began, ahead = time.perf_counter(), False
        while time.perf_counter() - began < SECONDS or ahead:
            tokens, start = draw(), time.perf_counter()
            step(tokens, ahead)
            seconds[ahead].append(time.perf_counter() - start)
            ahead = not ahead
        now = manager.metrics()
        reads = sum(now.disk_latency.counts) - sum(before.disk_latency.counts)
        steps = sum(map(len, seconds.values()))
        read = now.disk_latency.total_seconds - before.disk_latency.total_seconds
        return {
            "in_memory": round(100 * rows / total),
            "streams": streams,
            "rows_from_disk": round(reads / steps, 1),
            "read_ms": round(read / max(1, reads) * 1e3, 2),
            "ms": round(float(np.mean(seconds[False])) * 1e3, 2),
            "ms_ahead": round(float(np.mean(seconds[True])) * 1e3, 2),
            "steps": steps,
            "prefetched": round(now.prefetched_rows / len(seconds[True]), 1),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--file", type=Path, required=True, metavar="ROWS")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rows = []
    DummyRowSource(GEOMETRY).write_rows(options.file, BASE, FILE_ROWS)
    try:
        for read in ("disk", "page cache"):
            source = DummyRowSource(GEOMETRY, file=options.file, direct=read == "disk")
            if read == "page cache":
                options.file.read_bytes()
            for streams in STREAMS:
                for in_memory in IN_MEMORY:
                    rows.append({"read": read} | measure(source, in_memory, streams))
                    print(rows[-1], flush=True)
            source.close()
    finally:
        options.file.unlink()
    gpu = {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    write_result(options.out, rows, gpu)


if __name__ == "__main__":
    main()
