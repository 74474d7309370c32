"""Packing reads a checkpoint's files one after another, each once, wherever its tensors are."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from moet.checkpoints import Checkpoint
from moet.checkpoints.base import TensorRef
from moet.checkpoints.directory import weight_map
from moet.checkpoints.shards import LocalShards
from moet.pack import write_pack
from moet.quantize import QUANTIZERS
from tests.fixtures.checkpoints import write_checkpoint
from tests.pack.test_round_trip import same_files


class AtHand(LocalShards):
    """Refuses to read what is not at hand: files fetched and not dropped, and what was kept; and to
    have more at hand than it says."""

    def __init__(self, path: Path, files: Iterable[str], ahead: int) -> None:
        super().__init__(path, files)
        self.ahead = ahead
        self.fetched: list[str] = []
        self.at_hand: set[str] = set()
        self.most_at_hand = 0
        self.kept: dict[str, set[int]] = {}
        self.most_kept = 0

    def fetch(self, file: str) -> None:
        self.at_hand.add(file)
        self.most_at_hand = max(self.most_at_hand, len(self.at_hand))
        self.fetched.append(file)

    def drop(self, file: str, keep: Iterable[TensorRef] = ()) -> None:
        self.at_hand.discard(file)
        self.kept[file] = {ref.offset for ref in keep}
        self.most_kept = max(self.most_kept, sum(map(len, self.kept.values())))

    def read(self, ref: TensorRef, buffer: Tensor) -> None:
        assert ref.file in self.at_hand or ref.offset in self.kept.get(ref.file, ())
        super().read(ref, buffer)


def deal(path: Path, shards: int, seed: int) -> None:
    """Puts every tensor into a file drawn at random, in a random order."""
    files = list(path.glob("*.safetensors"))
    tensors = {name: of for file in files for name, of in load_file(file).items()}
    for file in files:
        file.unlink()
    rng, names = random.Random(seed), sorted(tensors)
    rng.shuffle(names)
    table = {name: f"model-{rng.randrange(shards)}.safetensors" for name in names}
    for file in sorted(set(table.values())):
        mine = {name: tensors[name] for name in names if table[name] == file}
        save_file(mine, path / file, {"format": "pt"})
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": table}))


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss"])
@pytest.mark.parametrize("dealt", [False, True], ids=["in-order", "dealt"])
@pytest.mark.parametrize("ahead", [0, 1])
def test_one_file_after_another(tmp_path, family, dealt, ahead):
    format = "mxfp4" if family == "gpt_oss" else "nvfp4"
    path = write_checkpoint(tmp_path / "model", family, format, shards=5, layers=3)
    if dealt:
        deal(path, shards=5, seed=1)
    quantizer = QUANTIZERS["data-free"]()
    with Checkpoint.open(path) as checkpoint:
        write_pack(checkpoint, tmp_path / "expected", quantizer=quantizer)
    table = weight_map(path)
    shards = AtHand(path, sorted(set(table.values())), ahead)
    with Checkpoint.assemble(path, "model", None, table, shards) as checkpoint:
        write_pack(checkpoint, tmp_path / "pack", quantizer=quantizer, workers=3)
        experts = {table[name] for name in table if checkpoint.is_expert_tensor(name)}
        total = sum(checkpoint.is_expert_tensor(name) for name in table)
    assert shards.fetched == sorted(experts)
    assert shards.most_at_hand == min(1 + ahead, len(experts))
    assert not any(shards.kept.values())
    if not dealt and family == "deepseek_v3":  # an expert's nine tensors straddle a boundary
        assert shards.most_kept < 9
    assert dealt or shards.most_kept < total
    same_files(tmp_path / "pack", tmp_path / "expected")
