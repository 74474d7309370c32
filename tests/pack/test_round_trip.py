"""What was packed is what was meant: rows against an independent computation in float64."""

from __future__ import annotations

import filecmp
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from moet.checkpoints import Checkpoint
from moet.formats import FORMATS, Precision
from moet.pack import Pack, PackRowSource, RowKey, Work, inspect_pack, write_pack
from moet.quantize import QUANTIZERS, MatrixContext
from tests.pack.conftest import QUANTIZER, Case
from tests.pack.independent import expert_weights, row_weights

PROJECTIONS = ("gate", "up", "down")


def weights_of(source: PackRowSource, pack: Pack, key: RowKey) -> tuple[np.ndarray, ...]:
    layout = source.layouts[key.precision]
    row = np.empty(layout.row_bytes, np.uint8)
    source.read(key, row)
    factor = source.factors(key.layer, key.precision)[key.expert]
    shape = (layout.hidden, layout.intermediate, layout.slices)
    return row_weights(row, key.precision.value, *shape, factor)


def test_rows_equal_an_independent_computation(case: Case) -> None:
    quantizer, pack = QUANTIZERS[QUANTIZER](), Pack.open(case.pack)
    with Checkpoint.open(case.checkpoint) as checkpoint, PackRowSource(pack, checkpoint) as source:
        assert source.layers == checkpoint.geometry.moe_layers
        for layer in source.layers:
            is_fp4 = checkpoint.expert_format(layer) in ("nvfp4", "mxfp4")
            for expert in range(source.num_experts):
                truth = expert_weights(case.checkpoint, layer, expert)
                base = weights_of(source, pack, RowKey(layer, expert, Precision.BASE))
                precision = pack.layers[layer].layout.fp4.precision
                fp4 = weights_of(source, pack, RowKey(layer, expert, precision))
                for which, weight, low, high in zip(PROJECTIONS, truth, base, fp4, strict=True):
                    context = MatrixContext(layer, expert, which)
                    two_bit = quantizer.quantize(weight.astype(np.float32), context)
                    assert np.array_equal(low.astype(np.float32), two_bit.decode())
                    if is_fp4:
                        assert np.array_equal(high, weight)  # recovery is exact
                    else:
                        assert precision is Precision.MXFP4
                        assert np.array_equal(high, best_mxfp4(weight))


def best_mxfp4(weight: np.ndarray) -> np.ndarray:
    import torch

    parts = FORMATS["mxfp4"].encode(torch.from_numpy(weight.astype(np.float32)), "least_error")
    return FORMATS["mxfp4"].decode(parts, torch.float64).numpy()


def test_the_ranks_slices_joined_are_the_whole_row(case: Case, direct_io: bool) -> None:
    pack = Pack.open(case.pack)
    slices = pack.manifest.format.slices
    sizes = [size for size in (2, 4, 8) if size <= slices]
    assert sizes
    with ExitStack() as stack:
        checkpoint = stack.enter_context(Checkpoint.open(case.checkpoint))
        whole = stack.enter_context(PackRowSource(pack, checkpoint))
        for size in sizes:
            ranks = [
                stack.enter_context(
                    PackRowSource(pack, checkpoint, tp_rank=rank, tp_size=size, direct_io=direct_io)
                )
                for rank in range(size)
            ]
            layer = whole.layers[-1]
            for precision in (Precision.BASE, pack.layers[layer].layout.fp4.precision):
                for expert in range(whole.num_experts):
                    compare(whole, ranks, RowKey(layer, expert, precision))


def compare(whole: PackRowSource, ranks: list[PackRowSource], key: RowKey) -> None:
    layout = whole.layouts[key.precision]
    row = np.empty(layout.row_bytes, np.uint8)
    whole.read(key, row)
    joined = []
    for source in ranks:
        local = source.layouts[key.precision]
        part = np.full(local.row_bytes, 0xFF, np.uint8)
        assert source.read(key, part) >= local.payload_bytes
        assert not part[local.payload_bytes :].any()
        joined.append(part[: local.payload_bytes])
    assert np.array_equal(np.concatenate(joined), row[: layout.payload_bytes])


def test_workers_change_nothing(nvfp4: Case, tmp_path: Path) -> None:
    with Checkpoint.open(nvfp4.checkpoint) as checkpoint:
        for workers in (1, 3):
            out = tmp_path / f"{workers}"
            write_pack(checkpoint, out, quantizer=QUANTIZERS[QUANTIZER](), workers=workers)
            same_files(out, nvfp4.pack)


def same_files(one: Path, other: Path) -> None:
    names = sorted(path.name for path in one.iterdir())
    assert names == sorted(path.name for path in other.iterdir())
    assert filecmp.cmpfiles(one, other, names, shallow=False)[1:] == ([], [])


class Recorder:
    """Keeps the events of a run."""

    def __init__(self) -> None:
        self.work: Work | None = None
        self.read = self.written = 0
        self.layers: list[int] = []
        self.files: list[str] = []

    def start(self, work: Work) -> None:
        self.work = work

    def fetch(self, file: str, size: int) -> None:
        self.files.append(file)

    def advance(self, read: int, written: int) -> None:
        self.read += read
        self.written += written

    def finish_layer(self, layer: int) -> None:
        self.layers.append(layer)


def test_progress_adds_up_to_what_was_announced(case: Case, tmp_path: Path) -> None:
    recorder, manifest = Recorder(), Pack.open(case.pack).manifest
    with Checkpoint.open(case.checkpoint) as checkpoint:
        report = write_pack(
            checkpoint,
            tmp_path / "pack",
            quantizer=QUANTIZERS[QUANTIZER](),
            slices=manifest.format.slices,
            with_fp4=manifest.format.with_fp4,
            progress=recorder,
        )
        experts = {ref.file for ref in checkpoint.tensors.values()}
        assert {file.name for file in manifest.model.files} == experts
        stored = sum(
            ref.nbytes
            for name, ref in checkpoint.tensors.items()
            if checkpoint.is_expert_tensor(name) and not name.endswith("input_scale")
        )
    same_files(tmp_path / "pack", case.pack)
    assert recorder.work == Work(stored, report.pack_bytes, len(manifest.layers), 0)
    assert (recorder.read, recorder.written) == (stored, report.pack_bytes)
    assert tuple(recorder.layers) == manifest.geometry.moe_layers
    files = (tmp_path / "pack").glob("layer-*")
    assert report.pack_bytes == sum(path.stat().st_size for path in files)


def test_inspect_sums_up(make_case: Callable[[str], Case]) -> None:
    case = make_case("deepseek-nvfp4")
    summary = inspect_pack(case.pack)
    weights = 2 * 4 * 3 * 128 * 64
    assert (summary.weights, summary.bf16_bytes) == (weights, 2 * weights)
    main, draft = summary.layers
    assert (main.source_format, main.fp4_stored, main.mtp) == ("nvfp4", "checkpoint", False)
    assert (draft.source_format, draft.fp4_stored, draft.mtp) == ("bf16", "pack", True)
    assert main.source_bytes == weights // 2 * 9 // 16 + 4 * 3 * 4
    assert draft.source_bytes == weights
    assert summary.statistics["count"] == weights
    assert sum(summary.statistics["codes"]) == weights
    squares = errors = 0.0
    with Checkpoint.open(case.checkpoint) as checkpoint:
        pack = Pack.open(case.pack)
        with PackRowSource(pack) as source:
            for layer in source.layers:
                for expert in range(source.num_experts):
                    base = weights_of(source, pack, RowKey(layer, expert, Precision.BASE))
                    for truth, low in zip(
                        expert_weights(checkpoint.path, layer, expert), base, strict=True
                    ):
                        squares += float((truth**2).sum())
                        errors += float(((low - truth) ** 2).sum())
    assert summary.statistics["relative_rms"] == pytest.approx((errors / squares) ** 0.5, rel=1e-6)
    assert 0.2 < summary.statistics["relative_rms"] < 0.45
