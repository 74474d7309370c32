"""`pack.cu` compiled by the host's C++ compiler, so that its arithmetic is tested without a GPU."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import threading
from contextlib import nullcontext
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import moet.pack.cuda
import moet.pack.lane
from moet.pack.cuda import CudaEncoder

DEVICE = r"""
#pragma once
#include <cmath>
#include <cstring>
#include <functional>
#include <ucontext.h>
#include <vector>
typedef unsigned char u8; typedef unsigned short u16; typedef unsigned u32;
typedef unsigned long long u64;
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static
struct Index { unsigned x; };
inline Index blockIdx, threadIdx, blockDim;
struct float4 { float x, y, z, w; };
struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
template <class To, class From> To bits(From v) { To to; memcpy(&to, &v, sizeof to); return to; }
inline int __float_as_int(float v) { return bits<int>(v); }
inline u32 __float_as_uint(float v) { return bits<u32>(v); }
inline float __int_as_float(int v) { return bits<float>(v); }
inline long long __double_as_longlong(double v) { return bits<long long>(v); }
inline double __longlong_as_double(long long v) { return bits<double>(v); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline int __ffs(u32 v) { return __builtin_ffs(v); }
inline bool __syncthreads_or(bool v) { return v; }  // a thread a block
template <class T> void atomicAdd(T* to, T v) { *to += v; }
// The threads of a block in turn, each from one barrier to the next.
inline ucontext_t scheduler, *running;
inline std::function<void()> body;
inline void __syncthreads() { swapcontext(running, &scheduler); }
inline void in_turn(unsigned threads) {
  static char stacks[64][1 << 16];
  ucontext_t contexts[64];
  bool over[64] = {};
  static bool* ended;
  ended = over;
  for (unsigned t = 0; t < threads; t++) {
    getcontext(&contexts[t]);
    contexts[t].uc_stack.ss_sp = stacks[t];
    contexts[t].uc_stack.ss_size = sizeof stacks[t];
    contexts[t].uc_link = &scheduler;
    makecontext(&contexts[t], +[] { body(); ended[threadIdx.x] = true; }, 0);
  }
  for (bool all = false; !all;) {
    all = true;
    for (unsigned t = 0; t < threads; t++)
      if (!over[t]) {
        threadIdx = {t}, running = &contexts[t], all = false;
        swapcontext(&scheduler, running);
      }
  }
}
template <class F> void each_thread(unsigned grid, unsigned threads, F f) {
  for (unsigned b = 0; b < grid; b++)
    for (unsigned t = 0; t < threads; t++) {
      blockIdx = {b}, threadIdx = {t}, blockDim = {threads};
      f();
    }
}
"""

LAUNCHES = r"""
extern "C" void host_search(const float* weight, const double* values, u8* codes, u8* scales,
                            int rows, int blocks, float factor, float inverse) {
  each_thread(rows, 1, [&] { search(weight, values, codes, scales, blocks, factor, inverse); });
}
extern "C" void host_statistics(const float* weight, const u8* codes, const u8* scales,
                                const double* values, double* sums, u64* counts, u8* used,
                                int rows, int blocks, float factor) {
  body = [&] {
    statistics(weight, codes, scales, values, sums, counts, used, rows, blocks, factor);
  };
  blockDim = {64};  // two rows at once
  for (unsigned b = 0; b < (rows + 1) / 2; b++) blockIdx = {b}, in_turn(64);
}
extern "C" void host_encode_mxfp4(const float* weight, u8* codes, u8* scales, int blocks) {
  each_thread(blocks, 1, [&] { encode_mxfp4(weight, codes, scales, blocks); });
}
extern "C" void host_tiles(const u8* codes, const u8* scales, u8* row, int grid, int columns,
                           int run, int down, int matrices, int which, int slice_bytes,
                           int codes_at, int scales_at, int words, int halves) {
  each_thread(grid, 128, [&] {
    tiles(codes, scales, row, columns, run, down, matrices, which, slice_bytes, codes_at,
          scales_at, words, halves);
  });
}
"""


def compiled(place: Path) -> ctypes.CDLL:
    """The kernels as functions of the host; skips where there is no C++ compiler."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    (place / "device.cuh").write_text(DEVICE)
    source = (files("moet.kernels.cuda") / "pack.cu").read_text()
    (place / "pack.cpp").write_text(source + LAUNCHES)
    library = place / "pack.so"
    subprocess.run(
        [compiler, "-std=c++20", "-O1", "-ffp-contract=off", "-Wno-unknown-pragmas", "-shared",
         "-fPIC", "-pthread", "-o", library, place / "pack.cpp"],
        check=True,
    )  # fmt: skip
    return ctypes.CDLL(str(library))


class HostEncoder(CudaEncoder):
    """`CudaEncoder` on the CPU, one expert at a time: the kernels' threads share static memory."""

    def __init__(self, kernels: ctypes.CDLL, patch: pytest.MonkeyPatch) -> None:
        stream = SimpleNamespace(cuda_stream=0, synchronize=lambda: None)
        for name, stand_in in (
            ("device", lambda _: nullcontext()), ("stream", lambda _: nullcontext()),
            ("Stream", lambda _: stream), ("current_stream", lambda _: stream),
            ("mem_get_info", lambda _: (2**30, 2**30)),
            ("get_device_properties", lambda _: SimpleNamespace(major=9, minor=0)),
        ):  # fmt: skip
            patch.setattr(torch.cuda, name, stand_in)
        patch.setattr(moet.pack.lane, "host_memory", lambda n: torch.empty(n, dtype=torch.uint8))
        patch.setattr(moet.pack.cuda, "cached_cubin", lambda *_: kernels)
        patch.setattr(moet.pack.cuda, "Kernel", _HostKernel)
        super().__init__(torch.device("cpu"))
        self._one = threading.Lock()
        self.encoded = 0

    def encode(self, *arguments: Any) -> Any:
        with self._one:
            rows = super().encode(*arguments)
            self.encoded += rows is not None
            return rows


_GRID_AT = {"search": 4, "tiles": 3}  # where the host's function takes the grid


class _HostKernel:
    """A kernel of `LAUNCHES`, with the arguments of a launch."""

    def __init__(self, kernels: ctypes.CDLL, name: str) -> None:
        self._name, self._function = name, getattr(kernels, f"host_{name}")

    def launch(self, grid: tuple[int, int], threads: int, stream: int, arguments: Any) -> None:
        values = [
            ctypes.c_void_p(a.data_ptr()) if isinstance(a, torch.Tensor)
            else ctypes.c_float(a) if isinstance(a, float) else ctypes.c_int(a)
            for a in arguments
        ]  # fmt: skip
        if self._name in _GRID_AT:
            values.insert(_GRID_AT[self._name], ctypes.c_int(grid[0]))
        self._function(*values)
