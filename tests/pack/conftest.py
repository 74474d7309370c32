"""Small checkpoints and their packs, made once a session; tests that write copy them first."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from moet.checkpoints import Checkpoint
from moet.errors import ConfigError
from moet.pack import write_pack
from moet.pack.files import StorageFile
from moet.quantize import QUANTIZERS
from tests.fixtures.checkpoints import write_checkpoint

QUANTIZER = "data-free"


class Case(NamedTuple):
    """A checkpoint in an official form, and the pack made from it."""

    checkpoint: Path
    pack: Path


# name → arguments of write_checkpoint and of write_pack
CASES = {
    "deepseek-nvfp4": (
        {"family": "deepseek_v3", "format": "nvfp4", "mtp_format": "bf16"},
        {},
    ),
    "deepseek-fp8": ({"family": "deepseek_v3", "format": "fp8_block"}, {}),
    "glm-nvfp4": ({"family": "glm4_moe", "format": "nvfp4", "shards": 1}, {"with_fp4": True}),
    "qwen-bf16": ({"family": "qwen3_moe", "format": "bf16"}, {"slices": 2}),
    # 256 wide: four or eight slices, whose size is not a multiple of 4096 bytes
    "qwen-nvfp4-wide": (
        {"family": "qwen3_moe", "format": "nvfp4", "intermediate": 256, "hidden": 96},
        {},
    ),
    "qwen-bf16-wide": (
        {"family": "qwen3_moe", "format": "bf16", "intermediate": 256, "hidden": 96},
        {"slices": 4},
    ),
}


@pytest.fixture(scope="session")
def make_case(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    """Makes the case of a name, or returns the one made before; it must not be written to."""
    made: dict[str, Case] = {}

    def make(name: str) -> Case:
        if name not in made:
            directory = tmp_path_factory.mktemp(name)
            shape, settings = CASES[name]
            path = write_checkpoint(
                directory / "model", **{"experts": 4, "layers": 2, "vocab": 64} | shape
            )
            with Checkpoint.open(path) as checkpoint:
                write_pack(
                    checkpoint, directory / "pack", quantizer=QUANTIZERS[QUANTIZER](), **settings
                )
            made[name] = Case(path, directory / "pack")
        return made[name]

    return make


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, make_case: Callable[[str], Case]) -> Case:
    """Each case in turn."""
    return make_case(request.param)


@pytest.fixture(scope="session", params=[False, True], ids=["buffered", "direct"])
def direct_io(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> bool:
    """Both ways of reading, where the file system has both."""
    probe = tmp_path_factory.getbasetemp() / "probe"
    probe.touch()
    try:
        StorageFile(probe, direct=request.param).close()
    except ConfigError as error:
        pytest.skip(error.message)
    return request.param


@pytest.fixture
def nvfp4(make_case: Callable[[str], Case]) -> Case:
    """NVFP4 layers, whose FP4 stays in the checkpoint, and a BF16 draft layer, packed as MXFP4."""
    return make_case("deepseek-nvfp4")


@pytest.fixture
def own_copy(nvfp4: Case, tmp_path: Path) -> Case:
    """A copy of `nvfp4` that the test may damage."""
    return Case(
        shutil.copytree(nvfp4.checkpoint, tmp_path / "model"),
        shutil.copytree(nvfp4.pack, tmp_path / "pack"),
    )
