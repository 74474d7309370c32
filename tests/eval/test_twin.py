"""The FP4 twin of a BF16 checkpoint: a checkpoint whose experts are exactly the MXFP4 ones."""

from __future__ import annotations

from pathlib import Path

import torch

from moet.checkpoints import Checkpoint
from moet.eval.pack import packed_experts
from moet.eval.sources import fp4_experts
from moet.eval.twin import write_fp4_twin
from moet.pack import Pack, PackRowSource, write_pack
from moet.quantize import DataFreeQuantizer
from tests.fixtures.checkpoints import write_checkpoint


def test_the_twins_experts_are_the_fp4_ones(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "m", format="bf16")
    with Checkpoint.open(source) as checkpoint:
        path = write_fp4_twin(checkpoint, tmp_path / "twin")
        fp4 = fp4_experts(checkpoint)
        with Checkpoint.open(path) as twin:
            assert twin.tensors.keys() == checkpoint.tensors.keys()
            assert twin.geometry == checkpoint.geometry
            again = fp4_experts(twin)
            write_pack(twin, tmp_path / "pack", quantizer=DataFreeQuantizer())
            pack = Pack.open(tmp_path / "pack")
            with PackRowSource(pack, twin) as rows:
                served = packed_experts(rows, pack.layers[1].layout.fp4.precision)
                for layer, expert in ((1, 0), (2, 7)):
                    for ours, theirs, twice, row in zip(
                        twin.decode_expert(layer, expert),
                        fp4(layer, expert),
                        again(layer, expert),
                        served(layer, expert),
                        strict=True,
                    ):
                        assert torch.equal(ours, theirs)
                        assert torch.equal(twice, theirs)
                        assert torch.equal(row, theirs)
            name = "model.embed_tokens.weight"
            assert torch.equal(twin.read_tensor(name), checkpoint.read_tensor(name))
