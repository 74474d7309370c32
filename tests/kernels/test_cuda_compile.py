"""The CUDA sources compile for every architecture named. Needs NVRTC, but no GPU."""

from __future__ import annotations

import pytest

from moet.kernels.cuda.compiler import (
    ARCHITECTURES,
    KernelCompileError,
    compile_cubin,
    compile_text,
)

pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings and nvidia-cuda-nvrtc")

SHAPES = {
    "DeepSeek-V4-Flash": {"HIDDEN": 4096, "INTER": 2048, "SLICES": 8, "EXPERTS": 256, "TOPK": 6},
    "Qwen3-30B-A3B": {"HIDDEN": 2048, "INTER": 768, "SLICES": 8, "EXPERTS": 128, "TOPK": 8},
}
DECODE = {"MAX_TOKENS": 16, "WARPS": 16, "OUT_BF16": 0}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_decode_compiles(architecture: str) -> None:
    source = "decode_sm90.cu" if architecture == "90a" else "decode.cu"
    assert compile_cubin(source, architecture, SHAPES["Qwen3-30B-A3B"] | DECODE)[:4] == b"\x7fELF"


def test_another_shape_compiles() -> None:
    assert compile_cubin("decode_sm90.cu", "90a", SHAPES["DeepSeek-V4-Flash"] | DECODE)


def test_an_error_carries_the_compilers_log() -> None:
    with pytest.raises(KernelCompileError, match="undeclared_name"):
        compile_text("__global__ void k() { undeclared_name; }", "bad.cu", "80", {})
