"""What an encoder makes of the first expert of each kind is compared with the CPU's rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moet.checkpoints import Checkpoint
from moet.errors import PackError
from moet.pack import write_pack
from moet.pack.encode import EncodedRows, RowEncoder, encode_rows
from moet.quantize.data_free import DataFreeQuantizer
from tests.fixtures.checkpoints import write_checkpoint


class Encoder(RowEncoder):
    """The CPU's rows, changed for one layer and expert."""

    def __init__(self, checkpoint: Checkpoint, change, layer: int, expert: int) -> None:
        self._checkpoint, self._change, self._place = checkpoint, change, (layer, expert)
        self._next: dict[int, int] = {}

    def encode(self, source, layout) -> EncodedRows:
        expert = self._next.get(layout.layer, 0)  # one worker: they come in order
        self._next[layout.layer] = expert + 1
        rows = encode_rows(self._checkpoint, DataFreeQuantizer(), layout, expert, source)
        return self._change(rows) if (layout.layer, expert) == self._place else rows


def flipped(row: np.ndarray) -> np.ndarray:
    row = row.copy()
    row[100] ^= 1
    return row


CHANGES = {
    "base row": lambda rows: replace(rows, base=flipped(rows.base)),
    "base factors": lambda rows: replace(rows, base_factor=rows.base_factor * 2),
    "FP4 row": lambda rows: replace(rows, fp4=flipped(rows.fp4)),
    "FP4 factors": lambda rows: replace(rows, fp4_factor=rows.fp4_factor * 2),
    "statistics": lambda rows: replace(rows, statistics=rows.statistics[::-1]),
}


def check(model: Path, out: Path, layer: int, what: str) -> None:
    with Checkpoint.open(model) as checkpoint:
        encoder = Encoder(checkpoint, CHANGES[what], layer, expert=0)
        message = f"layer {layer}, expert 0: the GPU's {what} differ"
        with pytest.raises(PackError, match=message) as error:
            write_pack(checkpoint, out, quantizer=DataFreeQuantizer(), encoder=encoder, workers=1)
        assert "--device cpu" in error.value.hint


@pytest.mark.parametrize("what", CHANGES)
def test_a_wrong_encoder_is_noticed(tmp_path: Path, what: str) -> None:
    """Before a layer is taken for finished."""
    model = write_checkpoint(
        tmp_path / "model", family="qwen3_moe", format="bf16", experts=2, layers=2, top_k=1
    )
    check(model, tmp_path / "pack", 0, what)
    assert not (tmp_path / "pack").exists()
    assert not list((tmp_path / "pack.partial").glob("*.safetensors"))


def test_with_layers_of_two_kinds(tmp_path: Path) -> None:
    """The draft layer is BF16: a kind of its own."""
    model = write_checkpoint(
        tmp_path / "model", "glm4_moe", "nvfp4", experts=2, layers=3, top_k=1, mtp_format="bf16"
    )
    check(model, tmp_path / "pack", 3, "FP4 row")
    check(model, tmp_path / "again", 1, "FP4 factors")
