"""What an encoder makes of each layer's first expert is compared with the CPU's rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moet.checkpoints import Checkpoint
from moet.errors import PackError
from moet.pack import encode as encoding
from moet.pack import write_pack
from moet.pack.encode import EncodedRows, RowEncoder
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
        rows = encoding._encode(self._checkpoint, DataFreeQuantizer(), layout, expert, source)
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


@pytest.mark.parametrize("what", CHANGES)
def test_a_wrong_encoder_is_noticed(tmp_path: Path, what: str) -> None:
    model = write_checkpoint(
        tmp_path / "model", family="qwen3_moe", format="bf16", experts=2, layers=2, top_k=1
    )
    with Checkpoint.open(model) as checkpoint:
        encoder = Encoder(checkpoint, CHANGES[what], layer=1, expert=0)
        with pytest.raises(PackError, match=f"layer 1, expert 0: the GPU's {what} differ") as error:
            write_pack(
                checkpoint, tmp_path / "pack", quantizer=DataFreeQuantizer(), encoder=encoder,
                workers=1,
            )  # fmt: skip
        assert "--device cpu" in error.value.hint
    assert not (tmp_path / "pack").exists()
