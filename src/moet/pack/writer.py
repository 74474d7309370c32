"""Writing a pack: the checkpoint streams through, file by file, expert by expert.

Each worker reads, decodes, quantizes, encodes and writes one expert at a time, so that memory holds
as many experts as there are workers, whatever the size of the model. A complete layer is synced
while later ones are packed.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from moet import __version__
from moet.checkpoints.reader import Checkpoint
from moet.errors import ConfigError, PackError
from moet.formats.layout import MAX_SLICES, Precision, max_slices
from moet.pack.encode import ExpertEncoder, RowEncoder
from moet.pack.encoder_check import CheckedEncoder
from moet.pack.files import writing
from moet.pack.finishing import Finisher
from moet.pack.identity import geometry_of, model_of
from moet.pack.layer import LayerLayout
from moet.pack.layer_writer import LayerWriter
from moet.pack.manifest import (
    Fp4,
    PackFormat,
    Quantizer,
    Recipe,
    layer_layout,
    seal,
)
from moet.pack.progress import Progress, Silent, Work
from moet.pack.schedule import Step, schedule
from moet.pack.workspace import Workspace, check_replaceable
from moet.quantize.base import BaseQuantizer
from moet.units import byte_size

MAX_WORKERS = 16  # each holds an expert in float32; more would ask for memory nobody expects
MANIFEST_ROOM = 2**20  # bytes, and as many again a layer over 64: moet.json with its statistics


@dataclass(frozen=True)
class PackReport:
    """What a finished run did.

    checkpoint_bytes: of the experts read by this run; pack_bytes: of the whole pack; layers: of
    the whole pack; layers_resumed: those that an earlier run had written; seconds: of this run.
    """

    path: Path
    digest: str
    checkpoint_bytes: int
    pack_bytes: int
    layers: int
    layers_resumed: int
    seconds: float


def write_pack(
    checkpoint: Checkpoint,
    out: str | Path,
    *,
    quantizer: BaseQuantizer,
    slices: int | None = None,
    with_fp4: bool = False,
    workers: int | None = None,
    progress: Progress | None = None,
    overwrite: bool = False,
    encoder: RowEncoder | None = None,
) -> PackReport:
    """Packs `checkpoint` into the directory `out`; a run that was interrupted is resumed.

    Args:
        slices: into how many slices rows are cut; the most tensor parallelism that can read them.
            Default: 8, or what the experts' width allows.
        with_fp4: store FP4 rows in the pack even where the checkpoint has them.
        workers: threads; default: one a core, up to 16.
        encoder: makes the rows of level 0 in the quantizer's place, to the same bits, which is
            checked with the first expert of each kind.
        overwrite: replace the pack in `out`; start anew where an unfinished one is of another kind.

    The pack appears in `out` when it is complete and durable; until then it is in `out`.partial.
    The bytes depend on the checkpoint, the quantizer and the settings only.

    Raises PackError when `out` cannot be written, is taken, is being written by another process,
    the disk is too small or the encoder is wrong; CheckpointError, UnsupportedError for a
    checkpoint that cannot be packed; ConfigError for impossible settings.
    """
    if encoder is not None and quantizer.level != 0:
        raise ConfigError(f"the encoder makes rows of level 0, not of level {quantizer.level}.")
    started = time.monotonic()
    out = Path(os.path.abspath(out))
    check_replaceable(out, overwrite=overwrite)
    recipe, fp4, layouts = _plan(checkpoint, quantizer, slices, with_fp4)
    progress = progress or Silent()
    with Workspace(out, recipe, overwrite=overwrite) as workspace:
        finished = {entry.layer for entry in workspace.finished}
        todo = [layout for layout in layouts if layout.layer not in finished]
        work = Work(
            read=sum(checkpoint.expert_bytes(of.layer) * of.experts for of in todo),
            written=sum(layout.file_bytes for layout in todo),
            layers=len(layouts),
            layers_done=len(finished),
        )
        _check_space(workspace.partial, work, checkpoint.shards.room if todo else 0)
        progress.start(work)
        with ExitStack() as stack:
            encode: ExpertEncoder | None = None
            check: Callable[[], None] | None = None
            if encoder is not None:
                checked = stack.enter_context(CheckedEncoder(encoder, checkpoint, quantizer))
                encode, check = checked.encode, checked.check
            writers = {
                layout.layer: LayerWriter(
                    checkpoint, quantizer, layout, recipe, workspace.partial, encode
                )
                for layout in todo
            }
            stack.callback(_close, writers)
            finisher = stack.enter_context(Finisher(workspace, progress, check))
            pool = stack.enter_context(
                ThreadPoolExecutor(workers or _default_workers(), "moet-pack")
            )
            # A quantizer that needs the layers in order reads some files of the checkpoint again.
            runs = [[layer] for layer in writers] if quantizer.in_order else [list(writers)]
            steps = [step for layers in runs for step in schedule(checkpoint, layers)]
            ahead = 0 if quantizer.in_order else checkpoint.shards.ahead
            try:
                with closing(_write(pool, checkpoint, writers, steps, progress, ahead)) as complete:
                    for layer in complete:
                        finisher.begin(writers.pop(layer), fp4[layer])
                        if quantizer.in_order:
                            finisher.settle()
            finally:
                finisher.settle()
        entries = [*workspace.finished, *finisher.entries]
        entries.sort(key=lambda entry: entry.layer)
        manifest = workspace.complete or seal(recipe, entries)
        workspace.publish(manifest)
    return PackReport(
        path=out,
        digest=manifest.digest,
        checkpoint_bytes=work.read,
        pack_bytes=sum(layout.file_bytes for layout in layouts),
        layers=len(layouts),
        layers_resumed=work.layers_done,
        seconds=time.monotonic() - started,
    )


def _write(
    pool: ThreadPoolExecutor,
    checkpoint: Checkpoint,
    writers: Mapping[int, LayerWriter],
    steps: Iterable[Step],
    progress: Progress,
    ahead: int,
) -> Generator[int, None, None]:
    """Writes the experts of `steps`, of up to `ahead` steps beyond the first that is not over;
    yields complete layers."""
    shards = checkpoint.shards
    begun: deque[tuple[Step, dict[Future[tuple[int, int]], int]]] = deque()

    def complete() -> Iterator[int]:
        """Ends the first step begun."""
        step, futures = begun[0]
        # In their order, so that an error loses no layer that was complete before it.
        for future, layer in futures.items():
            progress.advance(*future.result())
            if layer in writers and writers[layer].complete:
                yield layer
        begun.popleft()
        for file in step.drop:
            shards.drop(file)
        shards.drop(step.file, step.keep)

    try:
        for step in steps:
            progress.fetch(step.file, shards.size(step.file))
            shards.fetch(step.file)
            futures = {
                pool.submit(writers[layer].write_expert, expert): layer
                for layer, expert in step.experts
            }
            begun.append((step, futures))
            if len(begun) > ahead:
                yield from complete()
        while begun:
            yield from complete()
    finally:
        # After an error nobody may write to a file that is about to be closed.
        left = [future for _, futures in begun for future in futures]
        for future in left:
            future.cancel()
        wait(left)


def _close(writers: Mapping[int, LayerWriter]) -> None:
    for writer in writers.values():
        writer.close()


def _plan(
    checkpoint: Checkpoint, quantizer: BaseQuantizer, slices: int | None, with_fp4: bool
) -> tuple[Recipe, dict[int, Fp4], list[LayerLayout]]:
    """What is to be written, before anything is."""
    geometry = geometry_of(checkpoint)
    slices = max_slices(geometry.intermediate) if slices is None else slices
    if slices not in (1, 2, 4, MAX_SLICES):
        raise ConfigError(f"{slices} slices are impossible.", "Choose 1, 2, 4 or 8.")
    fp4 = {layer: _fp4(checkpoint, layer, with_fp4) for layer in geometry.moe_layers}
    layouts = [layer_layout(geometry, slices, layer, fp4[layer]) for layer in geometry.moe_layers]
    rows = {row.precision: row.row_bytes for of in layouts for row in (of.base, of.fp4)}
    recipe = Recipe(
        schema_version=1,
        writer=f"moet {__version__}",
        model=model_of(checkpoint),
        geometry=geometry,
        format=PackFormat(slices=slices, row_bytes=rows, with_fp4=with_fp4),
        quantizer=Quantizer(
            name=quantizer.name, level=quantizer.level, calibration=quantizer.calibration
        ),
    )
    return recipe, fp4, layouts


def _fp4(checkpoint: Checkpoint, layer: int, with_fp4: bool) -> Fp4:
    """A layer's FP4: the checkpoint's own where it has one, else our MXFP4."""
    stored = checkpoint.expert_format(layer)
    if stored == Precision.NVFP4:
        return Fp4(precision=Precision.NVFP4, stored="pack" if with_fp4 else "checkpoint")
    if stored == Precision.MXFP4:
        return Fp4(precision=Precision.MXFP4, stored="pack" if with_fp4 else "checkpoint")
    return Fp4(precision=Precision.MXFP4, stored="pack")


def _check_space(directory: Path, work: Work, room: int) -> None:
    """Raises PackError when the disk cannot take what is still to be written; room: beside it."""
    with writing(directory):
        status = os.statvfs(directory)
    free = status.f_bavail * status.f_frsize
    needed = work.written + MANIFEST_ROOM * (1 + work.layers // 64) + room
    if free < needed:
        raise PackError(
            f"{directory}: needs {byte_size(needed)}, but its disk has {byte_size(free)} free.",
            f"Free {byte_size(needed - free)}, or choose a directory on another disk.",
        )


def _default_workers() -> int:
    return min(len(os.sched_getaffinity(0)), MAX_WORKERS)
