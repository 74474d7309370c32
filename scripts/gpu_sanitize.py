"""The GPU kernels on one small shape with rows of all precisions, to run under compute-sanitizer.

    PYTHONPATH=src compute-sanitizer --report-api-errors no python scripts/gpu_sanitize.py
    PYTHONPATH=src compute-sanitizer --tool racecheck python scripts/gpu_sanitize.py

API errors are not reported, for cuda-bindings asks the driver for functions that it may not have.
Each line is a call and its relative error against the float64 reference.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from moet.formats.layout import Precision, RowLayout
from moet.kernels.base import SwiGLU
from moet.kernels.cuda.decode import DecodeExperts
from moet.kernels.cuda.prefill import PrefillExperts
from tests.gpu.experts import Layer, random_routing, relative_error

HIDDEN, INTERMEDIATE, SLICES, EXPERTS, TOP_K = 256, 256, 4, 6, 2


def main() -> None:
    precisions = list(Precision)
    layouts = {p: RowLayout(p, HIDDEN, INTERMEDIATE, SLICES) for p in precisions}
    layer = Layer.random(layouts, [precisions[e % len(precisions)] for e in range(EXPERTS)], seed=1)
    device = torch.device("cuda")
    for fp8 in (False, True):
        several = DecodeExperts(layer.shape(TOP_K), device, fp8_activations=fp8, most_tokens=32)
        few = DecodeExperts(layer.shape(TOP_K), device, fp8_activations=fp8)
        prefill = PrefillExperts(layer.shape(TOP_K), device, fp8_activations=fp8, max_tokens=64)
        for kernels, tokens in ((few, 1), (few, 5), (few, 16), (several, 40), (prefill, 40)):
            ids, weights = random_routing(tokens, EXPERTS, TOP_K, seed=tokens)
            x = torch.randn(tokens, HIDDEN, device=device).bfloat16()
            out = torch.empty(tokens, HIDDEN, device=device)
            kernels.forward(
                x, ids, weights, layer.address, layer.precision, layer.factor, SwiGLU(), out
            )
            error = relative_error(out, layer.reference(x, ids, weights, SwiGLU()))
            print(f"{type(kernels).__name__} {fp8=} {tokens=} {error:.1e}", flush=True)


if __name__ == "__main__":
    main()
