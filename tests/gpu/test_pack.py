"""Level 0 on a GPU makes the pack that the CPU makes, byte for byte."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from moet.checkpoints import Checkpoint
from moet.errors import CheckpointError
from moet.pack import write_pack
from moet.pack.cuda import CudaEncoder
from moet.quantize import DataFreeQuantizer
from tests.fixtures.checkpoints import write_checkpoint

pytestmark = pytest.mark.gpu

SOURCES = [
    ("deepseek_v3", "bf16"), ("deepseek_v3", "fp8_block"), ("deepseek_v3", "nvfp4"),
    ("kimi_k2", "int4_group"), ("deepseek_v4", "mxfp4"), ("deepseek_v4", "fp8_block"),
    ("gpt_oss", "mxfp4"), ("llama4_text", "bf16"),
]  # fmt: skip


@pytest.fixture(scope="module")
def encoder() -> CudaEncoder:
    return CudaEncoder(torch.device("cuda"))


class Counted(CudaEncoder):
    """Counts the experts that it left to the CPU."""

    left = 0

    def encode(self, source, layout):  # type: ignore[no-untyped-def]
        rows = super().encode(source, layout)
        self.left += rows is None
        return rows


@pytest.mark.parametrize("with_fp4", [False, True])
@pytest.mark.parametrize(("family", "format"), SOURCES)
def test_same_pack(family: str, format: str, with_fp4: bool, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", family, format, hidden=256, intermediate=128)
    encoder = Counted(torch.device("cuda"))
    with Checkpoint.open(model) as checkpoint:
        for name, by in (("cpu", None), ("gpu", encoder)):
            write_pack(
                checkpoint, tmp_path / name, quantizer=DataFreeQuantizer(), with_fp4=with_fp4,
                encoder=by,
            )  # fmt: skip
    assert encoder.left == 0
    files = sorted(path.name for path in (tmp_path / "cpu").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "gpu").iterdir())
    for name in files:
        assert (tmp_path / "gpu" / name).read_bytes() == (tmp_path / "cpu" / name).read_bytes()


def test_a_real_width(tmp_path: Path) -> None:
    """An expert of Kimi-K2.7's size, with what random numbers lack: zeros, tiny and huge blocks."""
    model = write_checkpoint(
        tmp_path / "model", "qwen3_moe", "bf16", hidden=7168, intermediate=2048, experts=2,
        layers=1, top_k=1, shards=1,
    )  # fmt: skip
    file = model / "model.safetensors"
    tensors = load_file(file)
    rng = torch.Generator().manual_seed(0)
    for name, tensor in tensors.items():
        if ".experts." in name:
            drawn = torch.rand(tensor.shape, generator=rng)
            tensor[drawn < 0.1] = 0.0
            tensor[drawn > 0.97] = -0.0
            tensor[:, :64] = 0.0
            tensor *= 2.0 ** torch.randint(-20, 4, (len(tensor), 1), generator=rng)
    save_file(tensors, file, {"format": "pt"})
    encoder = Counted(torch.device("cuda"))
    with Checkpoint.open(model) as checkpoint:
        digests = {
            write_pack(
                checkpoint, tmp_path / name, quantizer=DataFreeQuantizer(), encoder=by
            ).digest
            for name, by in (("cpu", None), ("gpu", encoder))
        }
    assert len(digests) == 1
    assert encoder.left == 0


def test_what_cannot_be_packed_is_said_as_on_the_cpu(encoder: CudaEncoder, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", "qwen3_moe", "bf16", shards=1)
    file = model / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    tensors[name][5, 7] = np.nan
    save_file(tensors, file, {"format": "pt"})
    with Checkpoint.open(model) as checkpoint, pytest.raises(CheckpointError, match=name):
        write_pack(checkpoint, tmp_path / "pack", quantizer=DataFreeQuantizer(), encoder=encoder)
