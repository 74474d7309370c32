"""The CUDA sources compile for every architecture named. Needs NVRTC, but no GPU."""

from __future__ import annotations

import pytest

from moet.errors import UnsupportedError
from moet.kernels.cuda.compiler import KernelCompileError, compile_cubin, compile_text
from moet.kernels.cuda.target import CAPABILITIES, Target

pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings and nvidia-cuda-nvrtc")

SHAPES = {
    "DeepSeek-V4-Flash": {"HIDDEN": 4096, "INTER": 2048, "SLICES": 8, "EXPERTS": 256, "TOPK": 6},
    "Qwen3-30B-A3B": {"HIDDEN": 2048, "INTER": 768, "SLICES": 8, "EXPERTS": 128, "TOPK": 8},
    "gpt-oss-120b": {
        "HIDDEN": 2880, "INTER": 2880, "SLICES": 2, "EXPERTS": 128, "TOPK": 4, "GPT_OSS": 1,
    },
}  # fmt: skip
DECODE = {"MAX_TOKENS": 16, "WARPS": 16, "OUT_BF16": 0}


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("fp8_activations", [0, 1])
def test_decode_compiles(capability: tuple[int, int], fp8_activations: int) -> None:
    target = Target.of(*capability)
    if fp8_activations and target.decode != "decode_fp8.cu":
        pytest.skip("decodes in BF16 only")
    shape = SHAPES["Qwen3-30B-A3B"] | DECODE | {"FP8_ACTIVATIONS": fp8_activations}
    cubin = compile_cubin(target.decode, target.architecture, shape | target.defines())
    assert cubin[:4] == b"\x7fELF"


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
@pytest.mark.parametrize("name", ["DeepSeek-V4-Flash", "gpt-oss-120b"])
def test_another_shape_compiles(name: str, capability: tuple[int, int]) -> None:
    target = Target.of(*capability)
    shape = SHAPES[name] | DECODE | {"FP8_ACTIVATIONS": 0}
    assert compile_cubin(target.decode, target.architecture, shape | target.defines())


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_packing_compiles(capability: tuple[int, int]) -> None:
    assert compile_cubin("pack.cu", Target.of(*capability).architecture, {})[:4] == b"\x7fELF"


def test_older_gpus_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"7\.5"):
        Target.of(7, 5)


def test_an_error_carries_the_compilers_log() -> None:
    with pytest.raises(KernelCompileError, match="undeclared_name"):
        compile_text("__global__ void k() { undeclared_name; }", "bad.cu", "80", {})
