"""Serves a synthetic model at DeepSeek-V4-Flash's MoE geometry from three tiers, in vLLM on a GPU.

    PYTHONPATH=src:. python -m benchmarks.residency_gpu --out bench/results/residency-<gpu>.json

One engine; its tiers are resized between the cases:
  all-hbm          every row in GPU memory
  hbm50, hbm19     50 and 19 % of them there, the rest in pinned memory
  hbm19-arena25    19 % there, 25 % in pinned memory, the rest on disk (read past the page cache)
and, with `--cases stock-fp4`, instead of it:
  stock-fp4        vLLM's own experts in NVFP4, without moet

The router prefers 19 % of the experts of each layer in 96 % of its choices. A row is one case and
number of streams: tok_s of decoding alone (two runs of different length, subtracted), gbps of
expert rows read, by tier too, and predicted_tok_s: the step of all-hbm for that many streams, plus
what rows in host memory add to a layer's kernel, at the share that it reaches of the bandwidth that
PCIe had before (`moet plan` reckons so), plus the bytes from disk ÷ the bandwidth that the disk had
just before. Rows with op "prefill" are prompts of 8,192 tokens, rows with op "memory" what the case
took: seconds to come to these tiers, and host memory of the worker (the arena, and the most that
the process has had so far). A row replaces the file's row of the same op, case, streams and layers;
the others keep the commit that they were measured at.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from vllm import LLM, SamplingParams, TokensPrompt

from benchmarks.gpu_timing import host_to_device_gbps
from benchmarks.synthetic import HOT_EXPERTS, HOT_SHARE, LAYERS, NVFP4, write_model
from moet.bench.results import Row, environment, read_result, write_result
from moet.bench.serving import decoded
from moet.checkpoints import family_of
from moet.checkpoints.base import Geometry
from moet.formats.layout import Precision
from moet.pack.dummy import DummyRowSource
from moet.plan.expert_time import in_place_seconds, kernel_seconds
from moet.plan.machine import GIB, Machine, host_bandwidth, parse_disk, parse_gpus
from moet.plan.measured import assumption

PROMPT, SHORT = 16, 8  # tokens
PREFILL = 8192
SEED = 0
STOCK = "stock-fp4"
MACHINE = Machine(*parse_gpus("H200"), 128 * GIB, host_bandwidth(16), 16, parse_disk("1TB"))
"""For the kernel's time; PCIe and the disk are measured."""


@dataclass(frozen=True)
class Case:
    """gpu, arena: shares of all rows in GPU memory and in pinned memory; 1: all that is not on the
    GPU. short: tokens of the shorter run. tokens: of the longer one, by streams. warm_up: tokens of
    each of eight streams before.
    """

    name: str
    gpu: float
    arena: float
    tokens: Mapping[int, int]
    short: int = SHORT
    warm_up: int = 100

    @property
    def from_disk(self) -> bool:
        return 0 < self.arena < 1


IN_MEMORY = {1: 136, 8: 104, 32: 72}
CASES = [
    Case("all-hbm", 1.0, 0.0, IN_MEMORY),
    Case("hbm50", 0.5, 1.0, IN_MEMORY),
    Case("hbm19", 0.19, 1.0, IN_MEMORY),
    # Disks are slow: few steps.
    Case("hbm19-arena25", 0.19, 0.25, {1: 68, 8: 20, 32: 12}, short=4, warm_up=8),
]


class Engine:
    """vLLM with a synthetic model."""

    extension = "benchmarks.synthetic.SyntheticExtension"

    def __init__(self, model: Path, options: dict[str, Any]) -> None:
        began = time.perf_counter()
        self.llm = LLM(
            model=str(model),
            load_format="dummy",
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            worker_extension_cls=self.extension,
            seed=SEED,
            **options,
        )
        self.boot_seconds = time.perf_counter() - began
        self.llm.collective_rpc("moet_prepare", args=(HOT_EXPERTS, HOT_SHARE))
        self.vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]

    def decode_seconds(
        self, streams: int, short: int, tokens: int, after: Callable[[], None]
    ) -> float:
        """Of one step: a run of `tokens` less a short one. after: called after each of them, and
        before the first."""
        self._generate(streams, short)
        after()
        seconds = []
        for length in (short, tokens):
            seconds.append(self._generate(streams, length))
            after()
        return (seconds[1] - seconds[0]) / (tokens - short)

    def prefill(self, case: str) -> Row:
        times = []
        for seed in range(3):
            prompt = self._prompts(1, PREFILL, seed)
            began = time.perf_counter()
            self.llm.generate(prompt, SamplingParams(max_tokens=1), use_tqdm=False)
            times.append(time.perf_counter() - began)
        seconds = sorted(times)[1]
        return {
            "op": "prefill", "case": case, "streams": 1,
            "tok_s": round(PREFILL / seconds, 1), "ms": round(seconds * 1e3, 1),
        }  # fmt: skip

    def _generate(self, streams: int, tokens: int) -> float:
        """Seconds."""
        sampling = SamplingParams(
            temperature=1.0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        prompts = self._prompts(streams, PROMPT, tokens)
        began = time.perf_counter()
        self.llm.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - began

    def _prompts(self, streams: int, tokens: int, seed: int) -> list[TokensPrompt]:
        ids = np.random.default_rng(seed).integers(3, self.vocabulary, (streams, tokens))
        return [TokensPrompt(prompt_token_ids=row.tolist()) for row in ids]


class Stock(Engine):
    """vLLM's own experts."""

    extension = "benchmarks.stock.StockExtension"

    def decode(self, streams: int) -> Row:
        step = self.decode_seconds(streams, SHORT, IN_MEMORY[streams], lambda: None)
        return {
            "op": "decode", "case": STOCK, "streams": streams,
            "tok_s": round(streams / step, 1), "ms": round(step * 1e3, 3),
        }  # fmt: skip


class Bench(Engine):
    """The engine with moet, what the machine's links reach, and the rows of each case."""

    def __init__(
        self,
        model: Path,
        geometry: Geometry,
        row_bytes: int,
        rows_file: Path,
        options: dict[str, Any],
    ) -> None:
        self.geometry, self.row_bytes, self._file = geometry, row_bytes, rows_file
        super().__init__(model, options)
        self.total = len(geometry.moe_layers) * geometry.num_experts  # rows
        self._step: dict[int, float] = {}  # seconds of a step with everything on the GPU
        self.copy_gbps = self.disk_gbps = 0.0

    def stats(self) -> dict[str, Any]:
        found: dict[str, Any] = self.llm.collective_rpc("moet_stats")[0]
        return found

    def enter(self, case: Case) -> float:
        """Resizes the tiers and lets decoding find its hot rows. Seconds of the former."""
        seconds = 0.0
        if case.gpu < 1:
            slots = round(self.total * case.gpu)
            places = round(self.total * case.arena) if case.arena < 1 else self.total - slots + 64
            values = {"base_pool": str(slots), "arena": str(places)}
            began = time.perf_counter()
            (answer,) = self.llm.collective_rpc("moet_resize", args=(values,))
            if "error" in answer:
                raise RuntimeError(answer["error"])
            seconds = time.perf_counter() - began
        if case.from_disk:
            self.llm.collective_rpc("moet_read_past_the_cache", args=(str(self._file),))
        self._generate(8, case.warm_up)
        if case.from_disk:  # behind the steps, after which rows change places still
            self.disk_gbps = disk_gbps(self._file)
        return seconds

    def decode(self, case: Case, streams: int) -> Row:
        snapshots: list[dict[str, Any]] = []
        tokens = case.tokens[streams]
        step = self.decode_seconds(
            streams, case.short, tokens, lambda: snapshots.append(self.stats())
        )
        steps = tokens - case.short

        def a_step(what: str) -> dict[str, float]:
            """What the longer run has more than the shorter one, for each of its further steps."""
            found = {}
            for tier in ("gpu", "arena", "disk"):
                before, middle, after = (decoded([of], tier, what) for of in snapshots)
                found[tier] = (after - 2 * middle + before) / steps
            return found

        rows, nbytes = a_step("rows"), a_step("bytes")
        if case.name == "all-hbm":
            self._step[streams] = step
        predicted = self._predicted(streams, rows)
        return {
            "op": "decode", "case": case.name, "streams": streams,
            "tok_s": round(streams / step, 1), "ms": round(step * 1e3, 3),
            "gbps": round(sum(nbytes.values()) / step / 1e9, 1),
            "predicted_tok_s": round(streams / predicted, 1) if predicted else None,
            "hit_rate": round(rows["gpu"] / sum(rows.values()), 4),
            "remote_rows_per_step": round(rows["arena"] + rows["disk"], 2),
            **{f"{tier}_mb": round(size / 1e6, 1) for tier, size in nbytes.items()},
        }  # fmt: skip

    def _predicted(self, streams: int, rows: Mapping[str, float]) -> float:
        """Seconds of a step that reads so many rows from each tier; 0 without an all-hbm run."""
        step = self._step.get(streams)
        if step is None:
            return 0.0
        layers, size = len(self.geometry.moe_layers), self.row_bytes
        used = sum(rows.values()) / layers
        routings = streams * self.geometry.top_k
        kernel = kernel_seconds(MACHINE, self.geometry, size, used, routings, "typical")
        absent = (rows["arena"] + rows["disk"]) / layers
        link = self.copy_gbps * 1e9 * assumption("in_place_share").typical
        step += layers * in_place_seconds(kernel, used, absent, size / link)
        return step + (rows["disk"] * size / self.disk_gbps / 1e9 if rows["disk"] else 0.0)

    def memory(self, case: Case, resized: float) -> Row:
        arena = [
            t["places"] * t["row_bytes"] for t in self.stats()["tiers"] if t["tier"] == "arena"
        ]
        peak: int = self.llm.collective_rpc("moet_host_peak")[0]
        return {
            "op": "memory", "case": case.name, "streams": 0, "resized_s": round(resized, 1),
            "arena_gib": round(sum(arena) / 2**30, 2), "host_peak_gib": round(peak / 2**30, 2),
        }  # fmt: skip


def disk_gbps(path: Path, threads: int = 8, block: int = 8 << 20, most: int = 8) -> float:
    """Of reading the file past the page cache, `block` bytes at a time, as the arena's memory is
    read into. Until it becomes no faster: what lies below a virtual disk may keep what has been
    read, as it does while the case runs."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    count = os.fstat(fd).st_size // block
    buffers = [mmap.mmap(-1, block, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for _ in range(threads)]
    for buffer in buffers:
        buffer.madvise(mmap.MADV_HUGEPAGE)

    def read(first: int) -> None:
        for number in range(first, count, threads):
            os.preadv(fd, [buffers[first]], number * 7919 % count * block)

    reached: list[float] = []
    with ThreadPoolExecutor(threads) as pool:
        while len(reached) < 2 or (reached[-1] > 1.03 * reached[-2] and len(reached) < most):
            began = time.perf_counter()
            list(pool.map(read, range(threads)))
            reached.append(count * block / (time.perf_counter() - began) / 1e9)
    os.close(fd)
    print("disk, GB/s:", *(round(gbps, 2) for gbps in reached), flush=True)
    return reached[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default=None, help="of the tree, where git is not at hand")
    parser.add_argument("--cases", nargs="*", default=[c.name for c in CASES])
    parser.add_argument("--streams", nargs="*", type=int, default=list(IN_MEMORY))
    parser.add_argument("--layers", type=int, default=None, help="fewer than the model's, to try")
    parser.add_argument("--rows-gib", type=float, default=8, help="of the file that rows are from")
    parser.add_argument("--gpu", type=float, default=0.97, help="vLLM's share of GPU memory")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        run(arguments, Path(directory))


def run(arguments: argparse.Namespace, directory: Path) -> None:
    layers = arguments.layers or LAYERS
    stock = STOCK in arguments.cases
    changes: dict[str, Any] = {"quantization_config": NVFP4} if stock else {}
    model = write_model(directory / "model", num_hidden_layers=layers, **changes)
    options = {
        "dtype": "bfloat16",
        "max_model_len": PREFILL + 1024,
        "max_num_batched_tokens": PREFILL,
        "max_num_seqs": 32,
        "gpu_memory_utilization": arguments.gpu,
        "kv_cache_memory_bytes": 2 << 30,
    }

    def write(rows: Sequence[Row], extra: Mapping[str, Any]) -> None:
        """Rows of a case, into those of the file (a run may be cut short)."""
        about = dict(extra) | ({"commit": arguments.commit} if arguments.commit else {})
        for row in rows:
            print(row, flush=True)
        write_rows(arguments.out, [row | {"layers": layers} for row in rows], about)

    if stock:
        engine = Stock(model, options)
        write([*map(engine.decode, arguments.streams), engine.prefill(STOCK)], {})
        return
    config = json.loads((model / "config.json").read_text())
    geometry = family_of(config).geometry(config)
    source = DummyRowSource(geometry)
    row_bytes = source.layouts[Precision.BASE].row_bytes
    rows_file = directory / "rows.bin"
    source.write_rows(rows_file, Precision.BASE, int(arguments.rows_gib * 2**30) // row_bytes)
    copy_gbps = host_to_device_gbps()
    settings = {
        "base_pool": "100%",
        "arena": "64",
        "pack": str(rows_file),
        "io_threads": 8,
        "prefill_staging": True,
    }
    bench = Bench(
        model,
        geometry,
        row_bytes,
        rows_file,
        options | {"quantization": "moet", "additional_config": {"moet": settings}},
    )
    bench.copy_gbps = copy_gbps
    for case in CASES:
        if case.name not in arguments.cases:
            continue
        resized = bench.enter(case)
        streams = sorted(set(arguments.streams) & set(case.tokens))
        rows = [bench.decode(case, number) for number in streams]
        if not case.from_disk:  # a prompt of this length reads most of the disk's rows
            rows.append(bench.prefill(case.name))
        write(
            [*rows, bench.memory(case, resized)],
            {
                "host_to_device_gbps": round(copy_gbps, 1),
                **({"disk_gbps": round(bench.disk_gbps, 2)} if case.from_disk else {}),
                "boot_s": round(bench.boot_seconds, 1),
                "rows": bench.total,
                "row_bytes": row_bytes,
            },
        )


def write_rows(path: Path, rows: Sequence[Row], extra: Mapping[str, Any]) -> None:
    """These rows, and the others that the file has."""

    def key(row: Row) -> tuple[Any, ...]:
        return tuple(row[name] for name in ("op", "case", "streams", "layers"))

    before = read_result(path) if path.exists() else {"rows": [], "environment": {}}
    mine, was = {key(row) for row in rows}, before["environment"]
    commit = (environment() | dict(extra))["commit"]
    kept = [{"commit": was.get("commit"), **row} for row in before["rows"] if key(row) not in mine]
    for row in kept:
        if row["commit"] == commit:
            del row["commit"]
    other = {k: v for k, v in was.items() if k not in environment()}
    write_result(path, [*kept, *rows], {**other, **extra})


if __name__ == "__main__":
    main()
