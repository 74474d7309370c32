"""A complete layer is synced beside the packing of later ones; what fails there loses no other."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from moet.checkpoints import Checkpoint
from moet.errors import PackError
from moet.pack import write_pack
from moet.quantize import QUANTIZERS
from moet.quantize.base import MatrixContext, MatrixQuantizer, TwoBitMatrix
from tests.fixtures.checkpoints import write_checkpoint
from tests.pack.test_round_trip import same_files


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model"
    return write_checkpoint(path, "qwen3_moe", "bf16", layers=3, shards=3, experts=4)


def name_of(fd: int) -> str:
    return Path(os.readlink(f"/proc/self/fd/{fd}")).name


def test_the_next_layer_does_not_wait(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last_begun, sync = threading.Event(), os.fsync
    quantizer = QUANTIZERS["data-free"]()

    class Noticed(MatrixQuantizer):
        name, level = quantizer.name, quantizer.level

        def quantize(self, weight: Any, context: MatrixContext) -> TwoBitMatrix:
            if context.layer == 2:
                last_begun.set()
            return quantizer.quantize(weight, context)

    def slow(fd: int) -> None:
        if name_of(fd).startswith("layer-00000"):
            assert last_begun.wait(30)
        sync(fd)

    with Checkpoint.open(model) as checkpoint:
        write_pack(checkpoint, tmp_path / "expected", quantizer=quantizer)
        monkeypatch.setattr(os, "fsync", slow)
        write_pack(checkpoint, tmp_path / "pack", quantizer=Noticed(), workers=1)
    same_files(tmp_path / "pack", tmp_path / "expected")


def test_a_quantizer_that_needs_the_layers_in_order_finds_them_finished(
    model: Path, tmp_path: Path
) -> None:
    quantizer = QUANTIZERS["data-free"]()
    journal, found = tmp_path / "pack.partial" / "journal.jsonl", set()

    class InOrder(MatrixQuantizer):
        name, level, in_order = quantizer.name, quantizer.level, True

        def quantize(self, weight: Any, context: MatrixContext) -> TwoBitMatrix:
            lines = journal.read_bytes().splitlines()
            found.add((context.layer, len(lines) - 1))  # the first is the recipe
            return quantizer.quantize(weight, context)

    with Checkpoint.open(model) as checkpoint:
        write_pack(checkpoint, tmp_path / "pack", quantizer=InOrder())
    assert found == {(0, 0), (1, 1), (2, 2)}


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_layer_that_cannot_be_synced(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layer: int
) -> None:
    sync, quantizer = os.fsync, QUANTIZERS["data-free"]()

    def full(fd: int) -> None:
        if name_of(fd).startswith(f"layer-{layer:05d}"):
            raise OSError(errno.ENOSPC, "no space")
        sync(fd)

    with Checkpoint.open(model) as checkpoint:
        write_pack(checkpoint, tmp_path / "expected", quantizer=quantizer)
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(PackError, match="disk is full"):
            write_pack(checkpoint, tmp_path / "pack", quantizer=quantizer, workers=1)
        monkeypatch.setattr(os, "fsync", sync)
        report = write_pack(checkpoint, tmp_path / "pack", quantizer=quantizer)
    assert report.layers_resumed >= layer
    same_files(tmp_path / "pack", tmp_path / "expected")
