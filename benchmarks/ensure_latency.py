"""Times what a GPU's tiers add to a step: `ensure`, requests and their answers, copies, pinning.

    PYTHONPATH=src python -m benchmarks.ensure_latency --out bench/results/ensure-<gpu>.json

43 layers of 256 experts, top-6; rows of 7,077,888 bytes (DeepSeek-V4-Flash's base rows). Cases:

* `ensure`: µs a layer, all layers in one replayed graph, all rows in memory. `table`: `copied` at
  the step's beginning, as it is in use, or read in `host` memory, as after a request; `none`: a
  kernel that stores the time in place of `ensure`.
* `request`: µs from a step's request until its kernel goes on, on the GPU's clock, less an `ensure`
  without one. A thread answers at once, six rows published before; `busy_threads` other threads
  of the process compute in pure Python all the while, which hold the interpreter for
  `switch_interval_us` at a time.
* `waiting`: share of a core that the waiting thread uses, between steps and while one runs.
* `publish`, `counts`: µs of the host. `copy`: GB/s of rows one by one, `in_flight` at a time.
* `staging`: GB/s of 64 rows copied by a kernel of so many blocks.
* `prefill`: ms a layer of a prompt, experts only, all rows in GPU memory, in the arena, or in the
  arena and staged.
* `pinning`: GiB/s of an arena of some GiB, by threads; `fresh`: memory that the machine has not
  used before.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu_timing import elapsed_us
from moet.bench.results import Row, write_result
from moet.formats.layout import Precision, RowLayout
from moet.kernels.base import SwiGLU
from moet.kernels.cuda.compiler import compile_text
from moet.kernels.cuda.launch import Kernel
from moet.kernels.cuda.prefill import PrefillExperts
from moet.kernels.cuda.shape import ExpertsShape
from moet.kernels.cuda.target import Target
from moet.residency.cuda import CudaTierDevice, memory
from moet.residency.cuda.kernels import Staged
from moet.residency.tiers import Entry, Place, Tier

LAYERS, EXPERTS, TOP_K = 43, 256, 6
ROW_BYTES = 7_077_888
BASE = Precision.BASE
STAMP = """
extern "C" __global__ void stamp(unsigned long long* at, int i) {
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(at[i]));
}
"""


def random_ids(tokens: int) -> list[Tensor]:
    """int32 [tokens, TOP_K] for each layer."""
    return [
        torch.rand(tokens, EXPERTS, device="cuda").topk(TOP_K).indices.to(torch.int32)
        for _ in range(LAYERS)
    ]


def graph_of(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def quantiles(values: list[float]) -> Row:
    cuts = np.quantile(values, [0.5, 0.99])
    return {"median_us": round(float(cuts[0]), 1), "p99_us": round(float(cuts[1]), 1)}


class Bench:
    def __init__(self) -> None:
        code = np.zeros((LAYERS, EXPERTS), np.uint8)
        cuda = torch.device("cuda")
        self.device = CudaTierDevice(code, {BASE: ROW_BYTES}, TOP_K, cuda, decode_tokens=32)
        self._buffer = Staged.empty(EXPERTS, 64, ROW_BYTES, cuda)
        self.device.resize(BASE, Tier.GPU, 64, ROW_BYTES)
        self.device.resize(BASE, Tier.ARENA, 64, ROW_BYTES)
        target = Target.of(*torch.cuda.get_device_capability())
        cubin = compile_text(STAMP, "stamp.cu", target.architecture, {})
        self._stamp = Kernel(cubin, "stamp")
        self._at = torch.zeros(2 * LAYERS, dtype=torch.int64, device="cuda")

    def _point(self, place: Place | None) -> None:
        """All entries."""
        self.device.publish(
            [Entry(BASE, layer, e, place) for layer in range(LAYERS) for e in range(EXPERTS)]
        )

    def _stamped(self, i: int) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        self._stamp.launch((1, 1), 1, stream, [self._at, i])

    def ensure(self) -> Iterator[Row]:
        self._point(Place(BASE, Tier.GPU, 0))

        def launches() -> None:
            for i in range(LAYERS + 1):
                self._stamped(i)

        yield {"case": "ensure", "table": "none", "us": self._replayed(launches, LAYERS)}
        for tokens in (1, 32, 8192):
            ids = random_ids(tokens)
            for first in (0, 1):

                def layers(first: int = first, ids: list[Tensor] = ids) -> None:
                    for layer in range(first, LAYERS):
                        self.device.ensure(layer, ids[layer])
                    self.device.finish()

                us = self._replayed(layers, LAYERS - first)
                table = "host" if first else "copied"
                yield {"case": "ensure", "table": table, "tokens": tokens, "us": us}

    def _replayed(self, run: Callable[[], None], launches: int) -> float:
        run()
        torch.cuda.synchronize()
        graph = graph_of(run)
        times = [elapsed_us(graph.replay) for _ in range(60)]
        return round(statistics.median(times[10:]) / launches, 2)

    def requests(self) -> Iterator[Row]:
        ids = random_ids(1)

        def stamped_layers() -> None:
            for layer in range(LAYERS):
                self._stamped(2 * layer)
                self.device.ensure(layer, ids[layer])
                self._stamped(2 * layer + 1)
            self.device.finish()

        self._point(Place(BASE, Tier.ARENA, 0))
        stamped_layers()
        torch.cuda.synchronize()
        graph = graph_of(stamped_layers)
        base = statistics.median(self._waits(graph, 20))
        self._point(None)
        usual = sys.getswitchinterval()
        for busy in (0, 1):
            for interval in (usual, 5e-4, 5e-5) if busy else (usual,):
                sys.setswitchinterval(interval)
                with Answering(self.device, busy):
                    waits = self._waits(graph, 4 if busy else 60)
                sys.setswitchinterval(usual)
                yield {
                    "case": "request", "busy_threads": busy,
                    "switch_interval_us": round(interval * 1e6),
                    **quantiles([max(0.0, wait - base) for wait in waits]),
                }  # fmt: skip

    def _waits(self, graph: torch.cuda.CUDAGraph, replays: int) -> list[float]:
        """µs between the stamps around each ensure."""
        waits: list[float] = []
        for _ in range(replays):
            graph.replay()
            torch.cuda.synchronize()
            stamps = self._at.view(LAYERS, 2).cpu()
            waits += ((stamps[:, 1] - stamps[:, 0]).double() / 1e3).tolist()
        return waits

    def waiting(self) -> Iterator[Row]:
        for name in ("between steps", "in a step"):
            if name == "in a step":
                self._point(Place(BASE, Tier.GPU, 0))
                self.device.ensure(0, random_ids(1)[0])
                torch.cuda.synchronize()
            begin, used = time.perf_counter(), time.thread_time()
            while time.perf_counter() - begin < 0.5:
                self.device.wait(2e-3, 1 << 60)
            used, wall = time.thread_time() - used, time.perf_counter() - begin
            yield {"case": "waiting", "when": name, "core_share": round(used / wall, 3)}
        self.device.finish()
        torch.cuda.synchronize()

    def host(self) -> Iterator[Row]:
        for count in (1, 6, 256):
            entries = [Entry(BASE, 1, e, Place(BASE, Tier.ARENA, 3)) for e in range(count)]
            us = timed_us(lambda entries=entries: self.device.publish(entries))
            yield {"case": "publish", "entries": count, "us": us}
        yield {"case": "counts", "us": timed_us(self.device.counts)}

    def copies(self) -> Iterator[Row]:
        for source, target in ((Tier.ARENA, Tier.GPU), (Tier.GPU, Tier.ARENA)):
            for in_flight, busy in ((1, 0), (4, 0), (16, 0), (16, 1)):
                with Answering(self.device, busy):
                    best = max(self._copied(source, target, in_flight) for _ in range(3))
                yield {
                    "case": "copy", "way": f"{source.name} → {target.name}".lower(),
                    "in_flight": in_flight, "busy_threads": busy, "gbps": round(best, 1),
                }  # fmt: skip

    def _copied(self, source: Tier, target: Tier, in_flight: int) -> float:
        rows = 64
        begin = time.perf_counter()
        open_ones: list = []
        for slot in range(rows):
            while len(open_ones) >= in_flight:
                self.device.wait(2e-5, 1 << 60)  # lets the thread that starts copies run
                open_ones = [copy for copy in open_ones if not copy.done()]
            places = Place(BASE, source, slot), Place(BASE, target, slot)
            open_ones.append(self.device.start_copy(*places))
        while not all(copy.done() for copy in open_ones):
            self.device.wait(2e-5, 1 << 60)
        return rows * ROW_BYTES / (time.perf_counter() - begin) / 1e9

    def staging(self) -> Iterator[Row]:
        self.device.publish([Entry(BASE, 1, e, Place(BASE, Tier.ARENA, e)) for e in range(64)])
        stream = torch.cuda.current_stream().cuda_stream
        for blocks in (4, 8, 16, 32, 132):
            us = min(
                elapsed_us(
                    lambda blocks=blocks: self.device._kernels.stage(
                        1, self.device.code, self._buffer, blocks, stream
                    )
                )
                for _ in range(4)
            )
            gbps = round(64 * ROW_BYTES / us / 1e3, 1)
            yield {"case": "staging", "blocks": blocks, "gbps": gbps}

    def pinning(self, gib: int) -> Iterator[Row]:
        rows = gib * 2**30 // ROW_BYTES
        for fresh, threads in ((True, 8), *((False, n) for n in (1, 2, 4, 8, 16))):
            memory._PINNING_THREADS = threads
            arena = memory.ArenaPlaces(ROW_BYTES, self.device._driver)
            begin = time.perf_counter()
            arena.resize(rows)
            middle = time.perf_counter()
            arena.resize(0)
            arena.trim()
            yield {
                "case": "pinning", "threads": threads, "fresh": fresh,
                "gib_s": round(rows * ROW_BYTES / 2**30 / (middle - begin), 2),
                "unpinning_gib_s": round(
                    rows * ROW_BYTES / 2**30 / (time.perf_counter() - middle), 2
                ),
            }  # fmt: skip


class PrefillBench:
    """Layers of a prompt, whose rows are all in one tier, through the real kernels."""

    LAYERS = 6

    def __init__(self) -> None:
        layout = RowLayout(BASE, 4096, 2048, 8)
        assert layout.row_bytes == ROW_BYTES
        cuda = torch.device("cuda")
        self.device = CudaTierDevice(
            np.zeros((self.LAYERS, EXPERTS), np.uint8), {BASE: ROW_BYTES}, TOP_K, cuda,
            decode_tokens=32, stage_row_bytes=ROW_BYTES, stage_rows=EXPERTS,
        )  # fmt: skip
        for tier in (Tier.GPU, Tier.ARENA):
            self.device.resize(BASE, tier, EXPERTS, ROW_BYTES)
        for chunk in self.device._gpu[BASE]._chunks:
            chunk.random_()
        torch.cuda.synchronize()
        pairs = [(Place(BASE, Tier.GPU, e), Place(BASE, Tier.ARENA, e)) for e in range(EXPERTS)]
        copies = [self.device.start_copy(*pair) for pair in pairs]
        while not all(copy.done() for copy in copies):
            time.sleep(1e-3)
        shape = ExpertsShape.of({BASE: layout}, EXPERTS, TOP_K)
        self.operator = PrefillExperts(shape, cuda, torch.bfloat16, max_tokens=4096)
        self.factor = torch.full((EXPERTS, 3), 1e-3, device="cuda")

    def rows(self) -> Iterator[Row]:
        staging = self.device._staging
        for tokens in (1024, 4096, 8192):
            for name, tier in (("gpu", Tier.GPU), ("arena", Tier.ARENA), ("staged", Tier.ARENA)):
                self.device._staging = staging if name == "staged" else None
                self.device.publish(
                    [
                        Entry(BASE, layer, e, Place(BASE, tier, e))
                        for layer in range(self.LAYERS)
                        for e in range(EXPERTS)
                    ]
                )
                ms = self._layer_ms(tokens)
                yield {"case": "prefill", "rows": name, "tokens": tokens, "layer_ms": round(ms, 2)}
        self.device._staging = staging

    def _layer_ms(self, tokens: int) -> float:
        x = torch.randn(tokens, 4096, device="cuda").bfloat16()
        out = torch.empty_like(x)
        ids = [
            torch.rand(tokens, EXPERTS, device="cuda").topk(TOP_K).indices.to(torch.int32)
            for _ in range(self.LAYERS)
        ]
        weights = torch.full((tokens, TOP_K), 1 / TOP_K, device="cuda")

        def layers() -> None:
            for layer in range(self.LAYERS):
                rows = self.device.ensure(layer, ids[layer])
                self.operator.forward(
                    x, ids[layer], weights, rows.address, rows.precision, self.factor, SwiGLU(), out
                )
            self.device.finish()

        layers()
        return min(elapsed_us(layers) for _ in range(2)) / self.LAYERS / 1e3


class Answering:
    """A thread that answers requests, and others that compute in Python."""

    def __init__(self, device: CudaTierDevice, busy_threads: int) -> None:
        self._device = device
        self._stop = False
        work = [self._answer] + [self._compute] * busy_threads
        self._threads = [threading.Thread(target=run) for run in work]

    def __enter__(self) -> None:
        for thread in self._threads:
            thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop = True
        for thread in self._threads:
            thread.join()

    def _answer(self) -> None:
        device, old = self._device, []
        seen = request.number if (request := device.poll()) else 0
        while not self._stop:
            device.wait(2e-3, seen)
            request = device.poll()
            if request is None:
                continue
            place = Place(BASE, Tier.ARENA, 0)
            new = [Entry(BASE, request.layer, e, place) for e in request.missing[BASE]]
            device.publish(old + new)
            device.answer(request.number, True)
            seen = request.number
            old = [Entry(BASE, request.layer, e, None) for e in request.missing[BASE]]
        device.publish(old)

    def _compute(self) -> None:
        total = 0
        while not self._stop:
            total += sum(range(1000))


def timed_us(run: Callable[[], object]) -> float:
    times = []
    for _ in range(200):
        begin = time.perf_counter()
        run()
        times.append((time.perf_counter() - begin) * 1e6)
    return round(statistics.median(times), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pin-gib", type=int, default=4)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    rows: list[Row] = []

    def take(part: Iterator[Row]) -> None:
        for row in part:
            print(row, flush=True)
            rows.append(row)
        write_result(arguments.out, rows, {"gpu": torch.cuda.get_device_name()})

    bench = Bench()
    for part in (
        bench.ensure, bench.requests, bench.waiting, bench.host, bench.copies, bench.staging,
    ):  # fmt: skip
        take(part())
    take(bench.pinning(arguments.pin_gib))
    bench.device.close()
    prefill = PrefillBench()
    take(prefill.rows())
    prefill.device.close()


if __name__ == "__main__":
    main()
