"""Seconds an expert and memory of each level, at the shapes of real models.

    python benchmarks/quantizing.py [--device cuda] [--tokens 131072] [--shape NAME …]

Synthetic weights and activations of a layer: the time depends on shapes and token counts alone.
The tokens of a layer are made on the device's host in BF16, as a calibration holds them, and each
expert gets its share of them. Writes bench/results/quantizing-DEVICE.json.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from moet.bench.results import Row, write_result
from moet.quantize import (
    CalibratedQuantizer,
    Expert,
    GptqQuantizer,
    LayerSamples,
    SampleSource,
    ScalesQuantizer,
    SequentialQuantizer,
)


class Shape(NamedTuple):
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    layers: int


SHAPES = {
    "tiny-moe": Shape(384, 256, 32, 4, 4),
    "Qwen3-30B-A3B": Shape(2048, 768, 128, 8, 48),
    "DeepSeek-V4-Flash": Shape(4096, 2048, 256, 6, 43),
    "DeepSeek-V3": Shape(7168, 2048, 256, 8, 58),
}
EXPERTS = 3  # timed, after one that warms up


class Synthetic(SampleSource):
    """One layer's random samples."""

    digest = "0" * 64

    def __init__(self, shape: Shape, tokens: int, paired: bool) -> None:
        rng = torch.Generator().manual_seed(0)
        x = torch.randn(tokens, shape.hidden, generator=rng).bfloat16()
        ids = torch.randint(0, shape.experts, (tokens, shape.top_k), generator=rng).int()
        weights = torch.rand(tokens, shape.top_k, generator=rng)
        noisy = (x.float() + 0.3 * torch.randn(x.shape, generator=rng)).bfloat16()
        self.samples = LayerSamples(x, ids, weights, quantized=noisy if paired else None)

    def layer(self, layer: int) -> LayerSamples:
        return self.samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default)
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--shape", nargs="+", choices=list(SHAPES), default=["DeepSeek-V4-Flash"])
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.set_num_threads(1)  # as `moet pack` does, which has a thread an expert
    rows = [row for name in options.shape for row in measure(name, options.tokens, device)]
    extra = {"gpu": torch.cuda.get_device_name(device)} if device.type == "cuda" else {}
    write_result(Path(f"bench/results/quantizing-{device.type}.json"), rows, extra)


def measure(name: str, tokens: int, device: torch.device) -> Iterator[Row]:
    """A row a level."""
    shape, rng = SHAPES[name], np.random.default_rng(0)
    sizes = ((shape.intermediate, shape.hidden),) * 2 + ((shape.hidden, shape.intermediate),)
    weights = Expert(*(rng.standard_normal(s, np.float32) * s[1] ** -0.5 for s in sizes))
    levels: tuple[type[CalibratedQuantizer], ...] = (
        ScalesQuantizer,
        GptqQuantizer,
        SequentialQuantizer,
    )
    for kind in levels:
        quantizer = kind(Synthetic(shape, tokens, kind.level == 3), device=device)
        seconds = [timed(quantizer, weights, expert, device) for expert in range(1 + EXPERTS)]
        middle = sorted(seconds[1:])[EXPERTS // 2]
        row: Row = {
            "model": name,
            "level": kind.level,
            "tokens": tokens,
            "layer_seconds": seconds[0] - middle,
            "expert_seconds": middle,
            "model_hours": shape.layers * (shape.experts * middle + seconds[0] - middle) / 3600,
            "peak_gib": peak(device) / 2**30,
        }
        print(row, flush=True)
        yield row


def timed(
    quantizer: CalibratedQuantizer, weights: Expert, expert: int, device: torch.device
) -> float:
    """Seconds of one expert; the first brings its layer's moments with it."""
    started = time.perf_counter()
    quantizer.quantize_expert(weights, 0, expert)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def peak(device: torch.device) -> float:
    """Bytes: of the GPU's memory, else of the process."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    return 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    main()
