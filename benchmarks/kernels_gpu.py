"""Times the routed-expert kernels on a GPU and writes bench/results/kernels-<gpu>.json.

Each row is one operator, shape, precision and number of tokens, with random distinct experts a
token: the whole operator (routing → output) of several layers as one replayed CUDA graph, divided
by the layers. Each layer has rows of its own and an L2 flush precedes each replay, so that every
row comes from HBM. `fraction_of_hbm` is the bytes of the distinct rows ÷ time ÷ the read bandwidth
measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from moet.formats.layout import Precision, RowLayout, max_slices
from moet.kernels.base import SwiGLU
from moet.kernels.cuda.compiler import compile_text
from moet.kernels.cuda.experts import PRECISION_CODES, CudaExperts, ExpertsShape
from moet.kernels.cuda.launch import Kernel

POOL_BYTES = 24 << 30
READ_BYTES = 8 << 30
READ = """
extern "C" __global__ void read(const uint4* p, int n, unsigned* out) {
  unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
  const unsigned long long step = (unsigned long long)gridDim.x * blockDim.x;
  unsigned a = 0;
  for (; i + 3 * step < n; i += 4 * step) {
    const uint4 x = __ldcs(p + i), y = __ldcs(p + i + step);
    const uint4 z = __ldcs(p + i + 2 * step), w = __ldcs(p + i + 3 * step);
    a ^= x.x ^ x.y ^ x.z ^ x.w ^ y.x ^ y.y ^ y.z ^ y.w;
    a ^= z.x ^ z.y ^ z.z ^ z.w ^ w.x ^ w.y ^ w.z ^ w.w;
  }
  if (a == 0x1234567u) *out = a;
}
"""


@dataclass(frozen=True)
class Model:
    """A layer's geometry."""

    name: str
    hidden: int
    intermediate: int
    experts: int
    top_k: int


@dataclass(frozen=True)
class Row:
    """One measurement."""

    op: str
    model: str
    precision: str
    tokens: int
    experts_read: float
    us: float
    gbps: float
    fraction_of_hbm: float


MODELS = [
    Model("DeepSeek-V4-Flash", 4096, 2048, 256, 6),
    Model("DeepSeek-V4-Flash TP2", 4096, 1024, 256, 6),
    Model("DeepSeek-V4-Flash TP4", 4096, 512, 256, 6),
    Model("GLM-5.2", 6144, 2048, 256, 8),
    Model("Kimi-K2.7", 7168, 2048, 384, 8),
    Model("Qwen3-30B-A3B", 2048, 768, 128, 8),
]
TOKENS = (1, 2, 4, 8, 16)


def elapsed_us(run: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3


def hbm_read_gbps() -> float:
    """The best of ten reads of 8 GiB by a kernel that does nothing else."""
    properties = torch.cuda.get_device_properties(0)
    architecture = f"{properties.major}{properties.minor}"
    kernel = Kernel(compile_text(READ, "read.cu", architecture, {}), "read", 0)
    data = torch.empty(READ_BYTES // 8, dtype=torch.int64, device="cuda").random_()
    out = torch.empty(1, dtype=torch.int32, device="cuda")
    stream = torch.cuda.current_stream().cuda_stream
    blocks = properties.multi_processor_count * 8

    def read() -> None:
        kernel.launch((blocks, 1), 512, stream, [data, READ_BYTES // 16, out])

    return max(READ_BYTES / elapsed_us(read) / 1e3 for _ in range(10))


def precisions_of(kind: str, experts: int) -> list[Precision]:
    if kind == "base + 20 % mxfp4":
        return [Precision.MXFP4 if e % 5 == 0 else Precision.BASE for e in range(experts)]
    return [Precision(kind)] * experts


def decode_rows(model: Model, kind: str, hbm: float, flush: torch.Tensor) -> list[Row]:
    slices = max_slices(model.intermediate)
    precisions = precisions_of(kind, model.experts)
    layouts = {p: RowLayout(p, model.hidden, model.intermediate, slices) for p in set(precisions)}
    sizes = torch.tensor([layouts[p].row_bytes for p in precisions])
    payload = torch.tensor([layouts[p].payload_bytes for p in precisions])
    offsets = torch.cumsum(sizes, 0) - sizes
    layers = int(max(2, min(8, POOL_BYTES // int(sizes.sum()))))
    pool = torch.empty((layers, int(sizes.sum())), dtype=torch.uint8, device="cuda")
    pool.view(torch.int64).random_()
    for layer in range(layers):  # scales: positive and of moderate size
        for e, p in enumerate(precisions):
            row = pool[layer, int(offsets[e]) : int(offsets[e]) + layouts[p].payload_bytes]
            part = row.view(slices, layouts[p].slice_bytes)
            for a, b in (
                (layouts[p].gate_up_scales, layouts[p].down_codes),
                (layouts[p].down_scales, layouts[p].slice_bytes),
            ):
                part[:, a:b].remainder_(4).add_(121 if p is Precision.MXFP4 else 0x30)
    address = pool.data_ptr() + (
        torch.arange(layers)[:, None] * int(sizes.sum()) + offsets[None]
    ).to("cuda")
    codes = torch.tensor([PRECISION_CODES[p] for p in precisions], dtype=torch.uint8).cuda()
    factor = torch.full((model.experts, 3), 0.01, device="cuda")
    operator = CudaExperts(
        ExpertsShape.of(layouts, model.experts, model.top_k), torch.device("cuda")
    )
    rows = []
    for tokens in TOKENS:
        x = torch.randn(tokens, model.hidden, device="cuda").bfloat16()
        weights = torch.full((tokens, model.top_k), 1 / model.top_k, device="cuda")
        ids = [
            torch.rand(tokens, model.experts, device="cuda").topk(model.top_k).indices.int()
            for _ in range(layers)
        ]
        out = torch.empty(tokens, model.hidden, device="cuda")

        def run(x=x, weights=weights, ids=ids, out=out) -> None:  # type: ignore[no-untyped-def]
            for layer in range(layers):
                operator.forward(
                    x, ids[layer], weights, address[layer], codes, factor, SwiGLU(10.0), out
                )

        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        times = []
        for _ in range(25):
            flush.sum()
            times.append(elapsed_us(graph.replay) / layers)
        us = statistics.median(times[5:])
        read = [i.unique().cpu().long() for i in ids]
        gbps = sum(int(payload[i].sum()) for i in read) / layers / us / 1e3
        count = sum(len(i) for i in read) / layers
        rows.append(
            Row("decode", model.name, kind, tokens, round(count, 1), round(us, 2), round(gbps),
                round(gbps / hbm, 4))
        )  # fmt: skip
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", nargs="*", default=[m.name for m in MODELS])
    parser.add_argument(
        "--precisions", nargs="*", default=["base", "mxfp4", "nvfp4", "base + 20 % mxfp4"]
    )
    arguments = parser.parse_args()
    torch.manual_seed(0)
    hbm = hbm_read_gbps()
    print(f"HBM read {hbm:.0f} GB/s", flush=True)
    flush = torch.empty(1 << 27, dtype=torch.int32, device="cuda")
    rows = []
    for model in MODELS:
        for kind in arguments.precisions if model.name in arguments.models else ():
            rows += decode_rows(model, kind, hbm, flush)
    environment = {
        "gpu": torch.cuda.get_device_name(),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "hbm_read_gbps": round(hbm),
    }
    result = {"environment": environment, "rows": [asdict(row) for row in rows]}
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
