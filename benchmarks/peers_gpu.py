"""Times other projects' MoE operators on the shapes of kernels_gpu.py, and writes a result file.

    PYTHONPATH=src python -m benchmarks.peers_gpu --out OUT.json --run-id ID

Same method: random distinct experts a token, several layers with weights of their own in one
replayed CUDA graph, an L2 flush before each replay, the median, and the HBM read bandwidth measured
in the same run. What does not import, build or run is named under `failures` with its error.
`python -m benchmarks.peers.merge` puts the ratios into our kernels' result file.

Needs vLLM for CUDA, which brings humming-kernels; for exllamav3 the library that
`peers/exllamav3_build.py` makes, on the import path as exllamav3_moe.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels_gpu import MODELS, POOL_BYTES, Model, elapsed_us, hbm_read_gbps
from benchmarks.peers.base import Peer
from moet.bench.results import write_result

PEERS = {
    "humming-uint2-g32": "humming:HummingUint2",
    "humming-uint2-g128": "humming:HummingUint2Group128",
    "humming-mxfp4": "humming:HummingMxfp4",
    "exllamav3-2bit": "exllamav3:ExllamaV3",
    "marlin-mxfp4": "marlin:MarlinMxfp4",
    "marlin-int4-g32": "marlin:MarlinInt4",
    "triton-fp8": "triton:TritonFp8",
    "triton-bf16": "triton:TritonBf16",
}
TOKENS = (1, 2, 4, 8, 16, 64, 512, 4096)
DECODE_TOKENS = 16
REPLAYS, WARM_UP = 25, 5


@dataclass(frozen=True)
class Row:
    """One measurement."""

    op: str
    peer: str
    model: str
    precision: str
    tokens: int
    experts_read: float
    us: float
    gbps: float
    fraction_of_hbm: float


class Budget:
    """Seconds of this run; `spent` once they are over."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def spent(self) -> bool:
        return time.monotonic() > self._end


def peer_class(name: str) -> type[Peer]:
    module, _, attribute = PEERS[name].partition(":")
    found: type[Peer] = getattr(importlib.import_module(f"benchmarks.peers.{module}"), attribute)
    return found


def median_us(peer: Peer, x: torch.Tensor, flush: torch.Tensor) -> float:
    """Microseconds a layer. Raises ArithmeticError when an output is not finite."""

    def run() -> list[torch.Tensor]:
        return [peer.forward(layer, x) for layer in range(peer.layers)]

    if not all(bool(out.isfinite().all()) for out in run()):
        raise ArithmeticError("an output is not finite")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(REPLAYS):
        flush.sum()
        times.append(elapsed_us(graph.replay) / peer.layers)
    return statistics.median(times[WARM_UP:])


def measure(name: str, peer: Peer, tokens: int, hbm: float, flush: torch.Tensor) -> Row:
    model = peer.model
    x = torch.randn(tokens, model.hidden, device="cuda").to(peer.activations)
    weights = torch.full((tokens, model.top_k), 1 / model.top_k, device="cuda")
    ids = [
        torch.rand(tokens, model.experts, device="cuda").topk(model.top_k).indices.int()
        for _ in range(peer.layers)
    ]
    peer.route(ids, weights)
    us = median_us(peer, x, flush)
    read = sum(len(i.unique()) for i in ids) / peer.layers
    gbps = read * peer.expert_bytes(model) / us / 1e3
    op = "decode" if tokens <= DECODE_TOKENS else "prefill"
    return Row(
        op, name, model.name, peer.precision, tokens, round(read, 1), round(us, 2), round(gbps),
        round(gbps / hbm, 4),
    )  # fmt: skip


def rows_of(
    name: str, model: Model, tokens: list[int], hbm: float, flush: torch.Tensor, budget: Budget,
    failures: list[dict[str, Any]],
) -> Iterator[Row]:  # fmt: skip
    """A peer's rows on one model; what fails joins `failures`."""
    case: dict[str, Any] = {"peer": name, "model": model.name}
    try:
        kind = peer_class(name)
        layer_bytes = kind.expert_bytes(model) * model.experts
        peer = kind(model, int(max(2, min(8, POOL_BYTES // layer_bytes))))
    except Exception as error:
        failures.append(case | {"error": f"{type(error).__name__}: {error}"[:2000]})
        return
    for count in tokens:
        if budget.spent:
            return
        try:
            yield measure(name, peer, count, hbm, flush)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"[:2000]
            failures.append(case | {"tokens": count, "error": text})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--run-id", default="", help="the same for our kernels' run beside it")
    parser.add_argument("--models", nargs="*", default=[m.name for m in MODELS])
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--tokens", nargs="*", type=int, default=list(TOKENS))
    parser.add_argument("--budget-seconds", type=float, default=float("inf"))
    arguments = parser.parse_args()
    budget = Budget(arguments.budget_seconds)
    torch.manual_seed(0)
    hbm = hbm_read_gbps()
    print(f"HBM read {hbm:.0f} GB/s", flush=True)
    flush = torch.empty(1 << 27, dtype=torch.int32, device="cuda")
    rows: list[Row] = []
    failures: list[dict[str, Any]] = []
    environment = {
        "gpu": torch.cuda.get_device_name(),
        "cuda": torch.version.cuda,
        "run_id": arguments.run_id,
        "hbm_read_gbps": round(hbm),
        "failures": failures,
    }
    by_name = {m.name: m for m in MODELS}
    for model in (by_name[name] for name in arguments.models):
        for name in arguments.peers:
            if budget.spent:
                break
            begin = time.monotonic()
            known = len(failures)
            for row in rows_of(name, model, arguments.tokens, hbm, flush, budget, failures):
                rows.append(row)
                print(row, flush=True)
            print(f"{name}: {time.monotonic() - begin:.1f} s", *failures[known:], flush=True)
            gc.collect()
            torch.cuda.empty_cache()
            write_result(arguments.out, [asdict(row) for row in rows], environment)


if __name__ == "__main__":
    main()
