"""What a history of the tiers does on a GPU: a kernel compares every byte of the rows in a snapshot
with what they should be, between a step's other kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from torch import Tensor

from moet.kernels.cuda.compiler import compile_text
from moet.kernels.cuda.launch import Kernel
from moet.kernels.cuda.target import Target
from moet.residency.cuda import CudaTierDevice, LayerRows
from tests.residency.cuda.source import RandomRows

_CHECK = """
#include "device.cuh"
// One block an id. result: rows that were wrong, rows that were the zeros of a failed step.
extern "C" __global__ void check(const int* ids, int layer, int experts, const u64* address,
                                 const u8* precision, const u8* code, const u8* first, int bytes,
                                 const u8* second, int second_bytes, int second_code,
                                 const u8* dummy, u64* result) {
  const int expert = ids[blockIdx.x];
  if (expert < 0 || expert >= experts) return;
  const u64 index = u64(layer) * experts + expert;
  const u8* row = (const u8*)address[expert];
  if (row == dummy) {
    if (threadIdx.x == 0) atomicAdd(result + 1, 1ull);
    return;
  }
  bool wrong = (precision[expert] & 0x7F) != code[index] || !row;
  const bool other = code[index] == second_code;
  const int size = other ? second_bytes : bytes;
  const uint4* expected = (const uint4*)((other ? second : first) + index * size);
  for (int times = 0; row && times < 2; times++)
    for (int i = threadIdx.x; i < size / 16; i += blockDim.x) {
      uint4 a;
      const uint4 b = expected[i];
      asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(a.x), "=r"(a.y), "=r"(a.z),
                   "=r"(a.w) : "l"((const uint4*)row + i) : "memory");
      wrong |= a.x != b.x || a.y != b.y || a.z != b.z || a.w != b.w;
    }
  if (__syncthreads_or(wrong) && threadIdx.x == 0) atomicAdd(result, 1ull);
}
"""


def architecture() -> str:
    return Target.of(*torch.cuda.get_device_capability()).architecture


class GpuSteps:
    """See `StandInSteps`."""

    torch_device = torch.device("cuda")

    def __init__(self, device: CudaTierDevice, source: RandomRows, code: np.ndarray) -> None:
        self._check = _kernel()
        self._experts = code.shape[1]
        self._code = torch.from_numpy(code).cuda()
        self._rows = [torch.from_numpy(rows).cuda() for rows in source.rows.values()]
        self._second_code = 1 if len(self._rows) > 1 else -1
        self._dummy = device._kernels.dummy
        self._result = torch.zeros(2, dtype=torch.int64, device="cuda")
        self._graphs: list[torch.cuda.CUDAGraph] = []

    @property
    def wrong(self) -> int:
        return int(self._result[0])

    @property
    def zeros(self) -> int:
        return int(self._result[1])

    def check(self, layer: int, rows: LayerRows, ids: Tensor, code: Tensor | None = None) -> None:
        first, second = self._rows[0], self._rows[-1]
        self._check.launch(
            (ids.numel(), 1), 128, torch.cuda.current_stream().cuda_stream,
            [ids, layer, self._experts, rows.address, rows.precision,
             self._code if code is None else code, first, first.shape[2], second, second.shape[2],
             self._second_code, self._dummy, self._result],
        )  # fmt: skip

    def write(self, target: Tensor, value: Tensor) -> None:
        target.copy_(value)

    def captured(self, steps: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            graph.capture_begin()
            steps()
            graph.capture_end()
        self._graphs.append(graph)
        return graph.replay

    def synchronize(self) -> None:
        torch.cuda.synchronize()


@cache
def _kernel() -> Kernel:
    return Kernel(compile_text(_CHECK, "check.cu", architecture(), {}), "check")
