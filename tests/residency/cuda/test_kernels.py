"""The kernels compile for every architecture, and agree with Python about memory. No GPU needed."""

from __future__ import annotations

import pytest

from moet.kernels.cuda.compiler import KernelCompileError, compile_cubin, compile_text
from moet.kernels.cuda.target import CAPABILITIES, Target
from moet.residency.cuda.ahead import hints_type
from moet.residency.cuda.kernels import state_words
from moet.residency.cuda.mailbox import mailbox_type, mask_words

pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings and nvidia-cuda-nvrtc")

# Layers, experts, planes: DeepSeek-V4-Flash and Kimi-K2 with FP4 rows.
SHAPES = [(43, 256, 0b001), (60, 384, 0b101)]
FIELDS = ("begun", "done", "failures", "failed_step", "steps", "steps_local", "request", "layer",
          "missing", "present", "rows", "use")  # fmt: skip


def defines(layers: int, experts: int, planes: int) -> dict[str, int]:
    sizes = {f"ROW_BYTES_{i}": 4096 * (i + 1) for i in range(3)}
    words = mask_words(experts)
    ahead = {"AHEAD": min(3, layers), "VOCABULARY": 129_280, "TOP_K": 6}
    of = {"LAYERS": layers, "EXPERTS": experts, "PLANES": planes, "MASK_WORDS": words}
    return of | sizes | ahead


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("source", ["ensure.cu", "stage.cu", "ahead.cu"])
def test_compiles(capability: tuple[int, int], source: str) -> None:
    for shape in SHAPES:
        cubin = compile_cubin(source, Target.of(*capability).architecture, defines(*shape))
        assert cubin[:4] == b"\x7fELF"


@pytest.mark.parametrize("shape", [*SHAPES, (2, 40, 0b011), (1, 1025, 0b111)])
def test_memory_is_laid_out_alike(shape: tuple[int, int, int]) -> None:
    layers, experts, mask = shape
    planes = mask.bit_count()
    kind = mailbox_type(planes, layers, experts)
    checks = [f"__builtin_offsetof(Mailbox, {f}) == {kind.fields[f][1]}" for f in FIELDS]
    checks.append(f"sizeof(Mailbox) == {kind.itemsize}")
    checks.append(f"sizeof(State) == {8 * state_words(planes, layers, experts)}")
    hints = hints_type(3, planes, experts)
    checks.append(f"__builtin_offsetof(Hints<3>, missing) == {hints.fields['missing'][1]}")
    checks += [f"sizeof(Hints<3>) == {hints.itemsize}", "sizeof(Posting) == 16"]
    text = "\n".join(['#include "tiers.cuh"', *(f'static_assert({c}, "");' for c in checks)])
    compile_text(text, "layout.cu", "80", defines(*shape))
    with pytest.raises(KernelCompileError, match="static assertion"):
        compile_text(text + 'static_assert(sizeof(State) == 1, "");', "x.cu", "80", defines(*shape))
