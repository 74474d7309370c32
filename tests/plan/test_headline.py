"""The headline models: sizes as published, and a full-size index within 500 MB."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from moet.formats.layout import Precision
from moet.plan.inventory import Inventory, Role
from moet.plan.kv import kv_cache
from moet.plan.model_files import ModelFiles

GIB = 1 << 30
Opened = dict[str, tuple[ModelFiles, Inventory]]

# GiB of the 2-bit base; of FP4 re-snapped to MXFP4; GB of the published checkpoint; its tensors.
SIZES = {
    "DeepSeek-V4-Flash": (72.56, 137.06, 166.88, 72_317),
    "GLM-5.2-NVFP4": (189.84, 358.59, 465, None),
    "Kimi-K2.7-Code-NVFP4": (265.78, 502.0, 595, None),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_are_the_published_ones(opened: Opened, name: str) -> None:
    base, fp4, checkpoint, tensors = SIZES[name]
    inventory = opened[name][1]
    rows = inventory.rows
    assert rows * inventory.layout(Precision.BASE).row_bytes / GIB == pytest.approx(base, abs=5e-3)
    assert rows * inventory.layout(Precision.MXFP4).row_bytes / GIB == pytest.approx(fp4, abs=5e-2)
    assert inventory.checkpoint_bytes / 1e9 == pytest.approx(checkpoint, rel=2e-3)
    assert tensors in (None, inventory.tensors)


def test_fp4_rows_are_the_checkpoints_own_where_it_is_fp4(opened: Opened) -> None:
    deepseek, glm = opened["DeepSeek-V4-Flash"][1], opened["GLM-5.2-NVFP4"][1]
    assert (deepseek.fp4, glm.fp4) == (Precision.MXFP4, Precision.NVFP4)
    for inventory in (deepseek, glm):
        ours = inventory.rows * inventory.layout(inventory.fp4).row_bytes
        assert ours == pytest.approx(inventory.parts[Role.EXPERTS].total, rel=1e-5)


def test_draft_layers_are_apart(opened: Opened) -> None:
    glm = opened["GLM-5.2-NVFP4"][1]
    assert glm.geometry.mtp_layers == (78,)
    assert glm.target_layers == 75
    drafts = glm.parts[Role.DRAFT].total + glm.parts[Role.DRAFT_EXPERTS].total
    assert drafts / 1e9 == pytest.approx(19.9, abs=0.2)
    assert opened["DeepSeek-V4-Flash"][1].geometry.mtp_layers == (43, 44, 45)


def test_kv_bytes_are_the_published_ones(opened: Opened) -> None:
    kimi = kv_cache(opened["Kimi-K2.7-Code-NVFP4"][1].text, dtype="fp8")
    assert kimi.per_token / 1024 == pytest.approx(34.3, abs=0.05)
    glm = opened["GLM-5.2-NVFP4"][1].text
    assert kv_cache(glm, dtype="fp8", drafts=1).per_token / 1000 == pytest.approx(54.7, abs=0.05)
    # Measured elsewhere at 4.96 kB with windows and states, which are counted per stream here.
    deepseek = kv_cache(opened["DeepSeek-V4-Flash"][1].text, dtype="fp8")
    assert 3.5e3 < deepseek.per_token < 4.96e3
    assert deepseek.per_stream > 43 * 128 * 584


def test_a_full_size_index_fits_in_500_mb(headline: dict[str, Path]) -> None:
    program = (
        "import resource, sys\n"
        "from moet.cli.main import app\n"
        "try:\n    app(sys.argv[1:])\n"
        "finally:\n    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)\n"
    )
    path = str(headline["DeepSeek-V4-Flash"])
    arguments = ["plan", path, "--gpu", "5090", "--ram", "64GiB", "--json"]
    # Through a shell: a process inherits the peak of the one that started it, which is this one.
    shell = ["sh", "-c", '"$@"; exit $?', "sh"]
    run = subprocess.run(
        [*shell, sys.executable, "-c", program, *arguments],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert json.loads(run.stdout)["model"]["tensors"] == 72_317
    assert int(run.stderr.split()[-1]) * 1024 < 500e6
