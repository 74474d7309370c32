"""Times the routed experts of a layer on the CPU and writes bench/results/kernels-cpu.json.

    python benchmarks/kernels_cpu.py

Every row is an expert shape, a precision and a number of tokens; tokens pick their experts at
random. The rows of experts fill 1 GiB and every step takes others, so they come from memory, not
from a cache. Beside the operator, in turns with it:

* 1 GiB of other memory is only read, 256 MiB at a time, by as many threads, plainly and with the
  operator's prefetch: `read_gbps` is the best of all. `gbps` is bytes of the distinct rows a step
  used ÷ its time, `fraction_of_read_bandwidth` is that ÷ this.
* dequantize-then-matmul in torch, on the same experts in plain order (codes packed low bits first,
  scales beside them): a table lookup to float32, times scales, then a product an expert. Its time
  is one expert's × the experts a step used; `vs_dequantize` is that ÷ the operator's time.

The best of all repeats stands for each of the three, since other work on the machine only adds to
a time; a row's repeats are spread over passes, so that no burst of other work meets all of them.
`cpu_of_others` is the share of the cores that other processes used meanwhile: do not trust a file
in which it is large.
"""

from __future__ import annotations

import argparse
import functools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from numba import njit, types
from numba.extending import intrinsic
from numpy.typing import NDArray
from torch import Tensor

from moet.bench.results import Row, write_result
from moet.formats.layout import Matrix, Precision, RowLayout, decode_row, max_slices
from moet.kernels import CpuExperts, ExpertRows, SwiGLU
from moet.kernels.cpu.simd import Vectors
from moet.kernels.cpu.strip import PREFETCH

RESULT = Path("bench/results/kernels-cpu.json")
POOL_BYTES = 1 << 30
STEP_BYTES = 4 << 20  # of rows, at least, in one timed step
TOKENS = (1, 4, 16)
REPEATS = 8  # of a row in a pass, or more if they take less than LEAST_SECONDS
LEAST_SECONDS = 0.6
# Scale bytes that keep values near one, and the factor of all three matrices.
SCALES = {Precision.BASE: (0x30, 0x40), Precision.MXFP4: (122, 128), Precision.NVFP4: (0x30, 0x40)}
FACTOR = 0.01


@dataclass(frozen=True)
class Shape:
    name: str
    hidden: int
    intermediate: int
    experts: int  # a layer
    topk: int


SHAPES = (
    Shape("nano-moe 256 × 128", 256, 128, 32, 4),
    Shape("DeepSeek-V4-Flash 4096 × 2048", 4096, 2048, 96, 6),
)


class Pool:
    """Rows with random codes, as layers of experts, in one piece of memory."""

    def __init__(self, shape: Shape, precision: Precision) -> None:
        self.layout = RowLayout(
            precision, shape.hidden, shape.intermediate, max_slices(shape.intermediate)
        )
        layer_bytes = shape.experts * self.layout.row_bytes
        self.layers = -(-POOL_BYTES // layer_bytes)
        self.memory = np.empty(self.layers * layer_bytes, np.uint8)
        rng = np.random.default_rng(0)
        noise = rng.integers(0, 256, (1 << 22) + 13, dtype=np.uint8)
        for start in range(0, self.memory.size, noise.size):
            self.memory[start : start + noise.size] = noise[: self.memory.size - start]
        rows = self.memory.reshape(self.layers * shape.experts, self.layout.row_bytes)
        ends = (
            (self.layout.gate_up_scales, self.layout.down_codes),
            (self.layout.down_scales, self.layout.slice_bytes),
        )
        for index in range(self.layout.slices):
            for low, high in ends:
                begin = index * self.layout.slice_bytes
                scales = rng.integers(*SCALES[precision], high - low, dtype=np.uint8)
                rows[:, begin + low : begin + high] = scales
        self._addresses = self.memory.ctypes.data + self.layout.row_bytes * np.arange(
            rows.shape[0], dtype=np.int64
        ).reshape(self.layers, shape.experts)
        self._experts = np.arange(shape.experts, dtype=np.int64)
        self._factor = np.full((shape.experts, 3), FACTOR, np.float32)
        self._precisions = [precision] * shape.experts

    def layer(self, index: int) -> ExpertRows:
        return ExpertRows(
            self._experts,
            self._addresses[index % self.layers],
            self._precisions,
            self._factor,
            {self.layout.precision: self.layout},
        )


@intrinsic  # type: ignore[untyped-decorator]
def _prefetch(typing: Any, address: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vectors = Vectors(builder)
        for ahead, level in PREFETCH:
            vectors.prefetch(vectors.at(args[0], ahead), level)
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@njit(nogil=True)  # type: ignore[untyped-decorator]
def read_plain(words: NDArray[np.uint64], address: int) -> np.uint64:
    total = np.uint64(0)
    for i in range(words.size):  # this form becomes vector loads; iteration does not
        total ^= words[i]
    return total


@njit(nogil=True)  # type: ignore[untyped-decorator]
def read_ahead(words: NDArray[np.uint64], address: int) -> np.uint64:
    """With the operator's own prefetch, which the hardware's does not equal."""
    total = np.uint64(0)
    for start in range(0, words.size - 63, 64):
        for line in range(8):
            _prefetch(address + 8 * start + 64 * line)
        for i in range(64):
            total ^= words[start + i]
    return total


class Reader:
    """Memory that is only read, a piece at a time; it also leaves nothing else in the caches."""

    def __init__(self, threads: int) -> None:
        self._pieces = np.array_split(np.ones(POOL_BYTES // 8, np.uint64), 4)
        self._threads = threads
        self.rates: list[float] = []  # bytes a second
        for read in (read_plain, read_ahead):
            read(self._pieces[0][:64], self._pieces[0].ctypes.data)  # compiles

    def measure(self) -> None:
        for read in (read_plain, read_ahead):
            self._time(read)

    def _time(self, read: Callable[[NDArray[np.uint64], int], object]) -> None:
        piece = self._pieces[len(self.rates) // 2 % len(self._pieces)]
        workers = [
            threading.Thread(target=read, args=(part, part.ctypes.data))
            for part in np.array_split(piece, self._threads)
        ]
        start = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        self.rates.append(piece.nbytes / (time.perf_counter() - start))


class Plain:
    """One expert's matrices in plain order, as a torch program would hold them."""

    def __init__(self, layout: RowLayout, row: NDArray[np.uint8]) -> None:
        self.precision = layout.precision
        bits = self.precision.code_bits
        values = np.array([1, 4, -1, -4] if bits == 2 else _E2M1, np.float32)
        every_byte = np.arange(256)[:, None] >> np.arange(0, 8, bits) & (1 << bits) - 1
        self.table = torch.from_numpy(values[every_byte])
        self.matrices = [self._pack(m, bits) for m in decode_row(layout, row)]

    def _pack(self, matrix: Matrix, bits: int) -> tuple[Tensor, Tensor]:
        parts = matrix.codes.reshape(matrix.codes.shape[0], -1, 8 // bits)
        packed = np.bitwise_or.reduce(parts << np.arange(0, 8, bits, dtype=np.uint8), axis=2)
        kind = torch.float8_e8m0fnu if self.precision is Precision.MXFP4 else torch.float8_e4m3fn
        return torch.from_numpy(packed), torch.from_numpy(matrix.scales).view(kind)

    def weight(self, which: int) -> Tensor:
        """float32 [N, K]."""
        packed, scales = self.matrices[which]
        codes = self.table.index_select(0, packed.flatten().int()).view(*scales.shape, -1)
        return codes.mul_((scales.float() * FACTOR).unsqueeze(-1)).flatten(1)

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = x @ self.weight(0).T, x @ self.weight(1).T
        return (torch.nn.functional.silu(gate) * up) @ self.weight(2).T


_E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


@dataclass
class Step:
    """Calls on consecutive layers, as a model makes them; enough that a clock tick is nothing."""

    pool: Pool
    operator: CpuExperts
    x: Tensor
    weights: Tensor
    ids: list[Tensor]
    first_layer: int

    def __call__(self) -> None:
        out = torch.zeros_like(self.x)
        for layer, ids in enumerate(self.ids, self.first_layer):
            rows = self.pool.layer(layer)
            self.operator.accumulate(self.x, ids, self.weights, rows, SwiGLU(), out)


@dataclass
class Samples:
    """What was measured of one row, in all passes."""

    steps: list[tuple[float, float, float]]  # seconds an expert, seconds a call, experts a call
    dense: list[float]  # seconds of dequantize-then-matmul, an expert

    def row(self, shape: Shape, layout: RowLayout, tokens: int, read_rate: float) -> Row:
        _, took, used = min(self.steps)
        rate = used * layout.payload_bytes / took
        return {
            "shape": shape.name,
            "precision": layout.precision.value,
            "tokens": tokens,
            "experts": round(used, 1),
            "us": took * 1e6,
            "us_median": float(np.median([step[1] for step in self.steps])) * 1e6,
            "gbps": rate / 1e9,
            "fraction_of_read_bandwidth": rate / read_rate,
            "vs_dequantize": min(self.dense) * used / took,
        }


def measure(
    shape: Shape, pool: Pool, operator: CpuExperts, reader: Reader, tokens: int, samples: Samples
) -> None:
    """One pass over a row."""
    rng = np.random.default_rng(len(samples.steps))
    plain = Plain(pool.layout, pool.memory[: pool.layout.row_bytes])
    x = torch.randn(tokens, shape.hidden)
    weights = torch.full((tokens, shape.topk), 1 / shape.topk)
    calls = -(-STEP_BYTES // (tokens * shape.topk * pool.layout.payload_bytes))
    turn, began = 0, time.perf_counter()
    while turn < REPEATS or time.perf_counter() - began < LEAST_SECONDS:
        ids = [_choose(rng, shape, tokens, turn) for _ in range(calls)]
        used = sum(len(np.unique(i)) for i in ids) / calls
        reader.measure()
        picked = [torch.from_numpy(i) for i in ids]
        took = seconds(Step(pool, operator, x, weights, picked, turn * calls)) / calls
        samples.steps.append((took / used, took, used))
        share = x[: round(tokens * shape.topk / used)]  # an average expert's tokens
        samples.dense.append(seconds(functools.partial(plain, share)))
        turn += 1


def busy_seconds() -> tuple[float, float]:
    """CPU seconds used since boot by all processes, and by this one."""
    machine, own = psutil.cpu_times(), psutil.Process().cpu_times()
    return machine.user + machine.nice + machine.system, own.user + own.system


def _choose(rng: np.random.Generator, shape: Shape, tokens: int, turn: int) -> NDArray[np.int32]:
    """Experts [tokens, topk]: for one token the next ones in turn, else at random."""
    if tokens == 1:
        return ((turn * shape.topk + np.arange(shape.topk)) % shape.experts).astype(np.int32)[None]
    picks = [rng.permutation(shape.experts)[: shape.topk] for _ in range(tokens)]
    return np.array(picks, np.int32)


def check(shape: Shape, pool: Pool, operator: CpuExperts) -> None:
    """Both sides compute the same: the first expert on two tokens."""
    x, out = torch.randn(2, shape.hidden), torch.zeros(2, shape.hidden)
    ids = torch.zeros(2, 1, dtype=torch.int32)
    operator.accumulate(x, ids, torch.ones(2, 1), pool.layer(0), SwiGLU(), out)
    expected = Plain(pool.layout, pool.memory[: pool.layout.row_bytes])(x)
    difference = (out - expected).norm() / out.norm()
    if not difference < 1e-5:
        raise SystemExit(f"the operator and torch differ by {difference:.1e}")


def _line(row: Row) -> str:
    tokens, experts = f"{row['tokens']} tokens", f"{row['experts']:.0f} experts"
    return (
        f"{row['shape']} {row['precision']:5} {tokens:9} {experts:10} {row['us']:9.1f} µs"
        f" (median {row['us_median']:.1f}), {row['gbps']:5.2f} GB/s ="
        f" {row['fraction_of_read_bandwidth']:4.0%};"
        f" {row['vs_dequantize']:.1f} × dequantize + matmul"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    operator = CpuExperts(threads=options.threads)
    operator.warm_up()
    reader = Reader(options.threads)
    began, before = time.perf_counter(), busy_seconds()
    found: dict[tuple[Shape, RowLayout, int], Samples] = {}
    for index in range(options.passes):
        for shape in SHAPES:
            for precision in Precision:
                pool = Pool(shape, precision)
                check(shape, pool, operator)
                for tokens in TOKENS:
                    key = (shape, pool.layout, tokens)
                    measure(
                        shape,
                        pool,
                        operator,
                        reader,
                        tokens,
                        found.setdefault(key, Samples([], [])),
                    )
        print(f"pass {index + 1} of {options.passes} done", flush=True)
    machine, own = (b - a for a, b in zip(before, busy_seconds(), strict=True))
    others = (machine - own) / (time.perf_counter() - began) / (psutil.cpu_count() or 1)
    rate = max(reader.rates)
    rows = [samples.row(*key, rate) for key, samples in found.items()]
    print(f"read bandwidth: {rate / 1e9:.1f} GB/s, {options.threads} threads; others {others:.0%}")
    for row in rows:
        print(_line(row))
    extra = {"threads": options.threads, "read_gbps": round(rate / 1e9, 2)}
    extra |= {"passes": options.passes, "cpu_of_others": round(others, 3)}
    write_result(options.output, rows, extra)


if __name__ == "__main__":
    main()
