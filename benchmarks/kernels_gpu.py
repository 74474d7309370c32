"""Times the routed-expert kernels on a GPU.

    PYTHONPATH=src python -m benchmarks.kernels_gpu --out bench/results/kernels-<gpu>.json

Each row is one operator, shape, precision and number of tokens, with random distinct experts a
token: the whole operator (routing → output) of several layers as one replayed CUDA graph, divided
by the layers. Each layer has rows of its own and an L2 flush precedes each replay, so that every
row comes from HBM. `fraction_of_hbm` is the bytes of the distinct rows ÷ time ÷ the read bandwidth
measured in the same run; `fraction_of_peak` the operations ÷ time ÷ cuBLAS's BF16 rate in the same
run. `pinned` rows: 256 experts of DeepSeek-V4-Flash's shape, once each, of which some lie in host
memory; `limit_us` is what they may take: max(all in HBM, 1.15 × remote bytes ÷ the copy engine's
bandwidth) + 30 µs.

With `--paths`, instead, each row times the same tokens through the decode kernel compiled for few
tokens a launch, through the one for several, and through the prefill kernels, in µs; `decoded` says
which way `CudaExperts` chooses.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.gpu_layers import MIXTURE, MODELS, POOL_BYTES, Batch, Layers, Model
from benchmarks.gpu_timing import (
    ColdReplay,
    dense_tflops,
    elapsed_us,
    hbm_read_gbps,
    host_to_device_gbps,
)
from moet.bench.results import Row, write_result
from moet.kernels.cuda.decode import DecodeExperts
from moet.kernels.cuda.dispatch import DECODE_TOKENS, SEVERAL_TOKENS, most_decoded
from moet.kernels.cuda.prefill import PrefillExperts

__all__ = ["MODELS", "POOL_BYTES", "Model", "elapsed_us", "hbm_read_gbps"]

TOKENS = (1, 2, 4, 8, 16, 64, 512, 4096)
REMOTE_ROWS = (0, 1, 4, 8, 32)
PATH_TOKENS = (32, 64, 96, 128, 192, 256)


class Bench:
    """One run: the ceilings, measured first, and the rows of each kind."""

    def __init__(self) -> None:
        self.hbm = hbm_read_gbps()
        self.dense = dense_tflops()
        self.copy = host_to_device_gbps()
        self._replay = ColdReplay()

    def experts(
        self, model: Model, kind: str, tokens: list[int], fp8_activations: bool
    ) -> Iterator[Row]:
        layers = Layers(model, kind)
        operator = layers.operator(fp8_activations)
        for count in tokens:
            batch = Batch(layers, count)
            decoded = count <= operator.decoded_tokens
            repeats = 20 if decoded else 6
            us = self._replay.median_us(lambda b=batch: b.run(operator), repeats) / layers.count
            gbps = batch.bytes_read / us / 1e3
            tflops = model.flops(count) / us / 1e6
            yield {
                "op": "decode" if decoded else "prefill",
                "activations": "fp8" if fp8_activations else "bf16",
                "model": model.name, "precision": kind, "tokens": count,
                "experts_read": round(batch.experts_read, 1), "us": round(us, 2),
                "gbps": round(gbps), "fraction_of_hbm": round(gbps / self.hbm, 4),
                "tflops": round(tflops, 1), "fraction_of_peak": round(tflops / self.dense, 4),
            }  # fmt: skip

    def paths(self, model: Model, kind: str, tokens: list[int]) -> Iterator[Row]:
        layers = Layers(model, kind, most=3)
        shape, device = layers.shape, torch.device("cuda")
        several = DecodeExperts(shape, device, most_tokens=SEVERAL_TOKENS)
        ways = {
            "us_few": DecodeExperts(shape, device, most_tokens=DECODE_TOKENS),
            "us_several": several,
            "us_prefill": PrefillExperts(shape, device, max_tokens=max(tokens)),
        }
        for count in tokens:
            batch = Batch(layers, count)
            times = {
                name: self._replay.median_us(lambda w=way, b=batch: b.run(w), 8) / layers.count  # type: ignore[misc]
                for name, way in ways.items()
            }
            yield {
                "model": model.name, "precision": kind, "tokens": count,
                "experts_read": round(batch.experts_read, 1),
                **{name: round(us, 1) for name, us in times.items()},
                "decoded": count <= most_decoded(shape, several.max_tokens),
            }  # fmt: skip

    def pinned(self) -> Iterator[Row]:
        """256 experts, 128 a launch, each chosen once; k of them in host memory."""
        model = replace(MODELS[0], top_k=8)
        all_in_hbm = 0.0
        for remote in REMOTE_ROWS:
            layers = Layers(model, "base", most=2)
            half = model.experts // 2
            ids = [
                (torch.randperm(half, device="cuda").int() + first).view(-1, model.top_k)
                for first in (0, half)
            ]
            batch = Batch(layers, half // model.top_k, ids)
            spread = [i * model.experts // max(remote, 1) for i in range(remote)]
            held = [layers.to_host(e // half, [e]) for e in spread]
            operator = layers.operator()
            us = self._replay.median_us(lambda b=batch, o=operator: b.run(o), 8)  # type: ignore[misc]
            if not remote:
                all_in_hbm = us
            size = remote * int(layers.payload[0])
            yield {
                "op": "pinned", "activations": "bf16", "model": model.name, "precision": "base",
                "tokens": len(batch.x), "remote_rows": remote, "us": round(us, 1),
                "copy_us": round(size / self.copy / 1e3, 1),
                "limit_us": round(max(all_in_hbm, 1.15 * size / self.copy / 1e3) + 30, 1),
            }  # fmt: skip
            del held


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--run-id", default="", help="names the run, to compare with peers' files")
    parser.add_argument("--commit", default=None, help="of the tree, where git is not at hand")
    parser.add_argument("--models", nargs="*", default=[m.name for m in MODELS])
    parser.add_argument("--precisions", nargs="*", default=["base", "mxfp4", "nvfp4", MIXTURE])
    parser.add_argument("--tokens", nargs="*", type=int)
    parser.add_argument("--paths", action="store_true", help="time each way to run the tokens")
    arguments = parser.parse_args()
    tokens = arguments.tokens or list(PATH_TOKENS if arguments.paths else TOKENS)
    torch.manual_seed(0)
    bench = Bench()
    rows: list[Row] = []

    def take(more: Iterator[Row]) -> None:
        for row in more:
            print(row, flush=True)
            rows.append(row)

    extra = {
        "gpu": torch.cuda.get_device_name(),
        "cuda": torch.version.cuda,
        "hbm_read_gbps": round(bench.hbm),
        "dense_bf16_tflops": round(bench.dense),
        "host_to_device_gbps": round(bench.copy, 1),
        "run_id": arguments.run_id,
    }
    if arguments.commit:
        extra["commit"] = arguments.commit
    for model in MODELS:
        if model.name not in arguments.models:
            continue
        for kind in arguments.precisions:
            if arguments.paths:
                take(bench.paths(model, kind, tokens))
            else:
                take(bench.experts(model, kind, tokens, fp8_activations=False))
        if model is MODELS[0] and not arguments.paths:
            take(bench.experts(model, "base", tokens, fp8_activations=True))
            take(bench.pinned())
        write_result(arguments.out, rows, extra)  # (a run may be cut short)


if __name__ == "__main__":
    main()
