"""Time on a GPU, and the machine's own ceilings, measured in the same run."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from moet.kernels.cuda.compiler import compile_text
from moet.kernels.cuda.launch import Kernel

READ_BYTES = 8 << 30
FLUSH_BYTES = 512 << 20  # several times an L2 cache
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


def elapsed_us(run: Callable[[], object]) -> float:
    """Between events around one call."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3


class ColdReplay:
    """Times a function as a replayed CUDA graph, after an L2 flush each time."""

    def __init__(self) -> None:
        self._flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")

    def median_us(self, run: Callable[[], object], repeats: int = 20) -> float:
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        times = []
        for _ in range(repeats + 4):
            self._flush.sum()
            times.append(elapsed_us(graph.replay))
        return statistics.median(times[4:])


def hbm_read_gbps() -> float:
    """The best of ten reads of 8 GiB by a kernel that does nothing else."""
    properties = torch.cuda.get_device_properties(0)
    architecture = f"{properties.major}{properties.minor}"
    kernel = Kernel(compile_text(READ, "read.cu", architecture, {}), "read")
    data = torch.empty(READ_BYTES // 8, dtype=torch.int64, device="cuda").random_()
    out = torch.empty(1, dtype=torch.int32, device="cuda")
    stream = torch.cuda.current_stream().cuda_stream
    blocks = properties.multi_processor_count * 8

    def read() -> None:
        kernel.launch((blocks, 1), 512, stream, [data, READ_BYTES // 16, out])

    return max(READ_BYTES / elapsed_us(read) / 1e3 for _ in range(10))


def dense_tflops() -> float:
    """The median of ten BF16 matrix products of 8192³ random numbers, by cuBLAS."""
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    times = [elapsed_us(lambda: a @ b) for _ in range(13)]
    return 2 * 8192**3 / statistics.median(times[3:]) / 1e6


def host_to_device_gbps() -> float:
    """The best of five copies of 1 GiB from pinned host memory."""
    host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device="cuda")
    return max(
        (1 << 30) / elapsed_us(lambda: device.copy_(host, non_blocking=True)) / 1e3
        for _ in range(5)
    )
