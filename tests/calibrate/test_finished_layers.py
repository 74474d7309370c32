"""Serving the finished layers of a pack that is still being written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from moet.checkpoints import Checkpoint
from moet.errors import PackError
from moet.formats.layout import Precision
from moet.pack import Pack, PackRowSource, RowKey, write_pack
from moet.quantize import DataFreeQuantizer, Expert, TwoBitExpert, TwoBitMatrix
from moet.vllm.quantized import with_finished_layers
from tests.fixtures.checkpoints import write_checkpoint


class Stops(DataFreeQuantizer):
    """Another base than level 0's, and no second layer."""

    in_order = True

    def quantize_expert(self, weights: Expert, layer: int, expert: int) -> TwoBitExpert:
        if layer == 2:
            raise KeyboardInterrupt
        base = super().quantize_expert(weights, layer, expert)
        return TwoBitExpert(*(TwoBitMatrix(m.codes, m.scales, 2 * m.factor) for m in base))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoint]:
    path = write_checkpoint(tmp_path_factory.mktemp("model") / "m", format="nvfp4")
    with Checkpoint.open(path) as checkpoint:
        yield checkpoint


@pytest.fixture(scope="module")
def pack(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Pack:
    path = tmp_path_factory.mktemp("pack") / "p"
    write_pack(checkpoint, path, quantizer=DataFreeQuantizer(), slices=2)
    return Pack.open(path)


def interrupted(checkpoint: Checkpoint, out: Path, slices: int) -> Path:
    with pytest.raises(KeyboardInterrupt):
        write_pack(checkpoint, out, quantizer=Stops(), slices=slices)
    return out.with_name(out.name + ".partial")


def test_rows_of_finished_layers_are_the_new_ones(
    checkpoint: Checkpoint, pack: Pack, tmp_path: Path
) -> None:
    partial = interrupted(checkpoint, tmp_path / "p", slices=2)
    mixed = with_finished_layers(pack, partial, [1])
    with PackRowSource(mixed, checkpoint) as new, PackRowSource(pack, checkpoint) as old:
        layout = new.layouts[Precision.BASE]
        rows = np.zeros((2, layout.row_bytes), np.uint8)
        for layer in (1, 2):
            for source, row in zip((new, old), rows, strict=True):
                source.read(RowKey(layer, 3, Precision.BASE), row)
            assert np.array_equal(*rows)  # codes and scales are level 0's
            factors = (s.factors(layer, Precision.BASE)[3] for s in (new, old))
            assert np.array_equal(next(factors), next(factors) * (2 if layer == 1 else 1))


def test_a_layer_that_is_not_finished(checkpoint: Checkpoint, pack: Pack, tmp_path: Path) -> None:
    partial = interrupted(checkpoint, tmp_path / "p", slices=2)
    with pytest.raises(PackError, match="layer 2 is not finished"):
        with_finished_layers(pack, partial, [1, 2])


def test_other_slices(checkpoint: Checkpoint, pack: Pack, tmp_path: Path) -> None:
    partial = interrupted(checkpoint, tmp_path / "p", slices=1)
    with pytest.raises(PackError, match=r"has 2 slices, the pack that is being made 1.*--slices 2"):
        with_finished_layers(pack, partial, [1])
