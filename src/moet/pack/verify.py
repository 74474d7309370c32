"""Checking a pack to the last byte: every problem is reported, not the first only."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from moet.checkpoints.reader import Checkpoint
from moet.errors import CheckpointError, MoetError, PackError
from moet.formats.layout import Precision
from moet.pack.checkpoint_rows import CheckpointRows
from moet.pack.files import StorageFile
from moet.pack.layer import slice_digests
from moet.pack.manifest import MANIFEST_NAME
from moet.pack.progress import Progress, Silent, Work
from moet.pack.reader import Pack, PackLayer, open_layer, read_manifest
from moet.pack.source import RowKey

WORKERS = 4  # enough to keep a disk busy while others hash


@dataclass(frozen=True)
class Problem:
    """What is wrong, and where.

    file: of the pack or, for FP4 rows that stay there, of the checkpoint. reason: in words, naming
    the row. layer, expert, precision, slice: the same for machines, as far as they apply.
    """

    file: str
    reason: str
    layer: int | None = None
    expert: int | None = None
    precision: Precision | None = None
    slice: int | None = None

    def __str__(self) -> str:
        return f"{self.file}: {self.reason}"


def verify_pack(
    path: str | Path, progress: Progress | None = None, *, checkpoint: Checkpoint | None = None
) -> list[Problem]:
    """Checks all of a pack and, with `checkpoint`, the FP4 rows that stay there.

    Returns every problem found, layer by layer; an empty list means that each byte is what was
    packed.
    """
    path, progress = Path(path), progress or Silent()
    try:
        manifest = read_manifest(path)
    except PackError as error:
        return [_problem(path / MANIFEST_NAME, error)]
    problems: list[Problem] = []
    layers: dict[int, PackLayer] = {}
    for entry in manifest.layers:
        try:
            layers[entry.layer] = open_layer(path, manifest, entry)
        except PackError as error:
            problems.append(_problem(path / entry.file, error, entry.layer))
    pack = Pack(path, manifest, layers)
    with ExitStack() as stack:
        source = None
        if checkpoint is not None:
            try:
                pack.check_model(checkpoint)
                source = stack.enter_context(CheckpointRows(pack, checkpoint))
            except MoetError as error:
                problems.append(_problem(path / MANIFEST_NAME, error))
        progress.start(_work(pack, source))
        pool = stack.enter_context(ThreadPoolExecutor(WORKERS, "moet-verify"))
        for layer in layers.values():
            with StorageFile(layer.path) as file:
                check = partial(_check_expert, layer, file, source)
                for found, read in pool.map(check, range(layer.layout.experts)):
                    problems += found
                    progress.advance(read, 0)
            progress.finish_layer(layer.entry.layer)
    return problems


def _work(pack: Pack, source: CheckpointRows | None) -> Work:
    layers = pack.layers.values()
    read = sum(layer.layout.tail_start - len(layer.layout.header) for layer in layers)
    if source is not None:
        read += sum(of.entry.source.bytes for of in layers if not of.layout.fp4_in_pack)
    return Work(read=read, written=0, layers=len(layers), layers_done=0)


def _check_expert(
    layer: PackLayer, file: StorageFile, source: CheckpointRows | None, expert: int
) -> tuple[list[Problem], int]:
    """The problems of an expert's rows, and the bytes read."""
    layout, problems, read = layer.layout, list[Problem](), 0
    own = (Precision.BASE, layout.fp4.precision) if layout.fp4_in_pack else (Precision.BASE,)
    for precision in own:
        name, whole = layout.rows(precision)
        where = f"layer {layout.layer} expert {expert}: the {precision} row"
        place = (layout.layer, expert, precision)
        row = np.empty(whole.row_bytes, np.uint8)
        try:
            read += file.read([row], layout.row_offset(precision, expert))
        except (OSError, EOFError) as error:
            reason = f"{where} cannot be read ({error})"
            problems.append(Problem(str(layer.path), reason, *place))
            continue
        wrong = (slice_digests(whole, row) != layer.arrays[f"{name}_blake3"][expert]).any(axis=1)
        for index in np.flatnonzero(wrong).tolist():
            reason = f"{where} is damaged (slice {index} fails its checksum)"
            problems.append(Problem(str(layer.path), reason, *place, index))
    if source is not None and not layout.fp4_in_pack:
        key = RowKey(layout.layer, expert, layout.fp4.precision)
        try:
            read += source.check(key)
        except CheckpointError as error:
            problems.append(Problem(source.files_of(key), error.message, *key))
    return problems, read


def _problem(path: Path, error: MoetError, layer: int | None = None) -> Problem:
    return Problem(str(path), error.message.removeprefix(f"{path}: "), layer)
