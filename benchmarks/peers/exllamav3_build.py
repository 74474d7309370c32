"""Builds the part of exllamav3's extension that its MoE needs at 2 bits, as one shared library.

    python benchmarks/peers/exllamav3_build.py SITE-PACKAGES/exllamav3/exllamav3_ext OUT.so

The whole extension takes over a hundred CUDA files; these are nine of them, unchanged, with
exllamav3's own compiler flags, for the present GPU generation's kernels (sm_90). What they refer to
at other bit widths is defined as absent. Needs nvcc, g++ and torch built for the same CUDA.
"""

from __future__ import annotations

import argparse
import subprocess
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch.utils.cpp_extension import COMMON_NVCC_FLAGS, include_paths, library_paths

SOURCES = (
    "quant/exl3_devctx.cu",
    "quant/exl3_moe.cu",
    "quant/exl3_moe_coop.cu",
    "quant/comp_units/exl3_moe_coop_inst_k2.cu",
    "quant/comp_units/exl3_moe_inst_k2_cb2.cu",
    "quant/comp_units/exl3_moe_inst_k2_cb2_m32.cu",
    "quant/comp_units/exl3_moe_inst_k2_cb2_m64.cu",
)
ABSENT = """
#include <cuda_fp16.h>
#include <cstdint>
#include "quant/comp_units/exl3_moe_instances.cuh"
#include "quant/comp_units/exl3_moe_coop_instances.cuh"
#define NONE(name) fp_exl3_moe_kernel name() { return nullptr; }
#define CB1(K) NONE(exl3_moe_kernel_k##K##_n128_cb1) NONE(exl3_moe_kernel_k##K##_n256_cb1)
#define CB2(K) NONE(exl3_moe_kernel_k##K##_n128_cb2) NONE(exl3_moe_kernel_k##K##_n256_cb2) \\
  NONE(exl3_moe_kernel_k##K##_n128_cb2_m32) NONE(exl3_moe_kernel_k##K##_n128_cb2_m64)
#define HALF(K) NONE(exl3_moe_kernel_h##K##_n128_cb2) NONE(exl3_moe_kernel_h##K##_n256_cb2) \\
  NONE(exl3_moe_kernel_h##K##_n128_cb2_m32) NONE(exl3_moe_kernel_h##K##_n128_cb2_m64) \\
  MoeCoopKernel exl3_moe_coop_kernel_a_h##K(int, bool) { return {}; } \\
  MoeCoopKernel exl3_moe_coop_kernel_b_h##K(bool) { return {}; }
#define COOP(K) MoeCoopKernel exl3_moe_coop_kernel_a_k##K(int, int, bool) { return {}; } \\
  MoeCoopKernel exl3_moe_coop_kernel_b_k##K(int, bool) { return {}; }
CB1(2) CB1(0) CB2(0)
CB1(1) CB1(3) CB1(4) CB1(5) CB1(6) CB1(7) CB1(8)
CB2(1) CB2(3) CB2(4) CB2(5) CB2(6) CB2(7) CB2(8)
HALF(1) HALF(2) HALF(3)
COOP(1) COOP(3) COOP(4) COOP(5) COOP(6) COOP(7) COOP(8)
"""
BINDINGS = """
#include <torch/extension.h>
#include "quant/exl3_moe.cuh"
#include "quant/exl3_moe_coop.cuh"
PYBIND11_MODULE(exllamav3_moe, m) {
  m.def("exl3_moe_max_concurrency", &exl3_moe_max_concurrency);
  m.def("exl3_moe", &exl3_moe);
  m.def("exl3_moe_gather", &exl3_moe_gather);
  m.def("exl3_moe_coop", &exl3_moe_coop);
}
"""


def build(sources: Path, out: Path, jobs: int = 2) -> None:
    """Compiles and links; a compiler's error is shown and raises subprocess.CalledProcessError."""
    includes = [f"-I{sources}", f"-I{sysconfig.get_paths()['include']}"]
    includes += [f"-I{path}" for path in include_paths("cuda")]
    site = Path(torch.__file__).parents[1]  # cuBLAS' header, where pip installed it
    includes += [f"-I{path}" for path in site.glob("nvidia/cu*/include")]
    common = ["-std=c++17", "-O3", *includes]
    cuda = ["nvcc", "-c", "-arch=sm_90", "--use_fast_math", "-Xcompiler=-fPIC", "-w"]
    cuda += [*COMMON_NVCC_FLAGS, "--compress-mode=size", *common]
    host = ["g++", "-c", "-fPIC", *common, "-DTORCH_EXTENSION_NAME=exllamav3_moe"]
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        absent, bindings = Path(folder) / "absent.cu", Path(folder) / "bindings.cpp"
        absent.write_text(ABSENT)
        bindings.write_text(BINDINGS)
        parts = [sources / name for name in SOURCES] + [absent, bindings]
        objects = [Path(folder) / f"{i}.o" for i in range(len(parts))]

        def compile_one(pair: tuple[Path, Path]) -> None:
            part, target = pair
            command = cuda if part.suffix == ".cu" else host
            subprocess.run([*command, str(part), "-o", str(target)], check=True)

        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(compile_one, zip(parts, objects, strict=True)))
        libraries = [f"-L{path}" for path in library_paths()]
        libraries += [
            "-lc10",
            "-lc10_cuda",
            "-ltorch",
            "-ltorch_cpu",
            "-ltorch_cuda",
            "-ltorch_python",
        ]
        subprocess.run(
            ["nvcc", "-shared", *map(str, objects), "-o", str(out), *libraries], check=True
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sources", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    build(arguments.sources.resolve(), arguments.out, arguments.jobs)
