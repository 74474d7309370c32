"""`moet pack`: an official checkpoint becomes a pack."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from moet.checkpoints import Checkpoint
from moet.checkpoints.hub import SCHEME
from moet.cli.device import Device, row_encoder
from moet.cli.engine import engine_options, engine_settings
from moet.cli.levels import level_quantizer
from moet.cli.progress import Bar
from moet.cli.source import open_source
from moet.cli.ui import emit_json, out
from moet.errors import ConfigError
from moet.pack import PackReport, write_pack
from moet.quantize import BaseQuantizer, DataFreeQuantizer
from moet.units import byte_size


def pack(
    model: Annotated[
        str,
        typer.Argument(
            help="A checkpoint directory, a hub name that is downloaded already, or "
            "hf://OWNER/NAME[@REVISION] to stream it from the hub."
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="The pack, a new directory. Default: under ~/.cache/moet/packs."
        ),
    ] = None,
    level: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=3,
            help="Effort: 0 from the weights alone; with a calibration 1 (scales), 2 (GPTQ) or 3 "
            "(2 layer by layer on the quantized model, inside vLLM). Default: 2 with, 0 without.",
        ),
    ] = None,
    calibration: Annotated[
        Path | None, typer.Option(help="What `moet calibrate` made of this model.")
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Level 3: a moet setting; repeatable."),
    ] = None,
    engine: Annotated[
        str, typer.Option(metavar="JSON", help="Level 3: vLLM's engine arguments.")
    ] = "{}",
    slices: Annotated[
        int | None,
        typer.Option(help="Largest tensor parallelism that can read the pack: 1, 2, 4 or 8."),
    ] = None,
    with_fp4: Annotated[
        bool,
        typer.Option(
            "--with-fp4",
            help="Also store FP4 rows that the checkpoint has: faster to read, 2.9 × the size.",
        ),
    ] = False,
    keep_checkpoint: Annotated[
        bool,
        typer.Option(
            "--keep-checkpoint",
            help="With hf://: keep what is downloaded, in the Hugging Face cache. Else each shard "
            "is deleted after use, and the disk needs room for the pack and one shard.",
        ),
    ] = False,
    device: Annotated[
        Device,
        typer.Option(help="Where to quantize: the GPU where there is one (auto), or as said."),
    ] = Device.AUTO,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Threads, one expert in memory each. Default: cores.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace what is in the way.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Pack MODEL: every routed expert at 2 bits, ready to serve.

    The checkpoint streams through expert by expert, so memory does not grow with the model. A run
    that is interrupted, however it was, resumes where it stopped; until it is complete, the pack is
    under the name OUTPUT.partial.

        moet pack ./DeepSeek-R1-NVFP4 -o /nvme/r1.moet
        moet pack hf://nvidia/DeepSeek-R1-NVFP4 -o /nvme/r1.moet
    """
    with open_source(model, output, keep=keep_checkpoint) as (checkpoint, path):
        if level is None:
            level = 0 if calibration is None else 2
        if level == 3 and model.startswith(SCHEME):
            raise ConfigError(
                "level 3 runs the model, which has to be on this machine for that.",
                f"Download it first: hf download {checkpoint.name}",
            )
        with level_quantizer(
            level,
            checkpoint,
            path,
            device=device,
            calibration=calibration,
            settings=engine_settings(option),
            engine=engine_options(engine),
        ) as quantizer:
            report = make_pack(
                checkpoint,
                path,
                quantizer=quantizer,
                slices=slices,
                with_fp4=with_fp4,
                workers=workers,
                force=force,
                device=device,
            )
    if as_json:
        emit_json(asdict(report) | {"path": str(report.path)})
        return
    rate = report.checkpoint_bytes / max(report.seconds, 1e-9)
    out.print(
        f"packed {report.layers} layers into [bold]{escape(str(report.path))}[/]: "
        f"{byte_size(report.pack_bytes)}, {report.seconds:.1f} s, "
        f"{byte_size(rate)}/s of checkpoint",
        soft_wrap=True,
    )


def make_pack(
    checkpoint: Checkpoint,
    path: Path,
    *,
    quantizer: BaseQuantizer | None = None,
    slices: int | None = None,
    with_fp4: bool = False,
    workers: int | None = None,
    force: bool = False,
    device: Device = Device.AUTO,
) -> PackReport:
    """Writes a pack under a progress bar, at level 0 unless a quantizer is given."""
    quantizer = quantizer or DataFreeQuantizer()
    where = device if quantizer.level == 0 else Device.CPU  # the others compute in the quantizer
    with row_encoder(where) as encoder, Bar("packing") as bar:
        return write_pack(
            checkpoint,
            path,
            quantizer=quantizer,
            slices=slices,
            with_fp4=with_fp4,
            workers=workers,
            progress=bar,
            overwrite=force,
            encoder=encoder,
        )
