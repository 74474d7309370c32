"""The prefill sources compile for every architecture, to the matrix instructions meant. No GPU."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

from moet.kernels.cuda.compiler import compile_cubin
from moet.kernels.cuda.target import CAPABILITIES, Target

pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings and nvidia-cuda-nvrtc")

# Tiles of 16 tokens alone: the code of larger ones is the same, but for the operands' number.
SHAPE = {
    "HIDDEN": 2048, "INTER": 768, "SLICES": 8, "EXPERTS": 128, "TOPK": 8, "TILE_TOKENS": 16,
}  # fmt: skip
FP8_SINCE = (8, 9)


def compiled(source: str, capability: tuple[int, int], fp8: bool, **more: int) -> bytes:
    target = Target.of(*capability)
    defines = (
        SHAPE
        | target.defines()
        | {
            "FP8_ACTIVATIONS": int(fp8),
            "OUT_BF16": 0,
            "PRECISIONS": 7,
        }
        | more
    )
    return compile_cubin(source, target.architecture, defines)


def products(capability: tuple[int, int]) -> str:
    return "prefill_sm90.cu" if Target.of(*capability).wgmma else "prefill.cu"


def instructions(cubin: bytes, place: Path) -> str:
    """The disassembly; skips where nvidia-cuda-nvdisasm is not installed."""
    own = list(Path(sysconfig.get_paths()["purelib"]).glob("nvidia/*/bin/nvdisasm"))
    tool = shutil.which("nvdisasm") or next(map(str, own), None)
    if tool is None:
        pytest.skip("needs nvidia-cuda-nvdisasm")
    file = place / "kernel.cubin"
    file.write_bytes(cubin)
    return subprocess.run([tool, "-c", file], check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_compiles(capability: tuple[int, int]) -> None:
    for fp8 in (False, True)[: 1 + (capability >= FP8_SINCE)]:
        for source in ("prefill_prepare.cu", products(capability)):
            assert compiled(source, capability, fp8)[:4] == b"\x7fELF"


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_gpt_oss_compiles(capability: tuple[int, int]) -> None:
    more = {"GPT_OSS": 1, "PRECISIONS": 1}
    for source in ("prefill_prepare.cu", products(capability)):
        assert compiled(source, capability, False, **more)[:4] == b"\x7fELF"


def test_hopper_uses_warpgroup_instructions(tmp_path: Path) -> None:
    text = instructions(compiled("prefill_sm90.cu", (9, 0), fp8=True), tmp_path)
    assert "HGMMA.64x16x16.F32.BF16" in text
    assert "QGMMA.64x16x32.F32.E4M3.E4M3" in text


def test_sm120_uses_the_block_scaled_instruction(tmp_path: Path) -> None:
    text = instructions(compiled("prefill.cu", (12, 0), fp8=True), tmp_path)
    assert "QMMA.SF.16832.F32.E4M3.E4M3.E8" in text
    assert "HMMA.16816.F32.BF16" in text
    assert "QMMA.16832" not in text  # at half the rate
