"""`moet calibrate`: what each layer of a model sees on a text, for levels 1 to 3 of `moet pack`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from moet import __version__
from moet.calibrate import (
    Calibration,
    CalibrationWriter,
    Metadata,
    Windows,
    cut_windows,
)
from moet.calibrate.layout import token_bytes
from moet.checkpoints import Checkpoint
from moet.checkpoints.local import local_checkpoint
from moet.cli.engine import engine_options, engine_settings, log_to_stderr
from moet.cli.levels import refuse_biases
from moet.cli.serve import find_pack
from moet.cli.ui import err, out
from moet.cli.windows import WindowBar, given_tokens
from moet.errors import CalibrationError
from moet.pack.identity import model_of
from moet.residency.sizing import size_rows
from moet.units import byte_size

TOKENS = 131_072
WINDOW = 2048


def calibrate(
    model: Annotated[
        str,
        typer.Argument(help="A checkpoint directory, or a hub name that is downloaded already."),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The calibration, a new file.")],
    tokens: Annotated[
        Path | None,
        typer.Option(
            help="Token ids: .npy, or raw little-endian uint16 (uint32 for large vocabularies)."
        ),
    ] = None,
    text: Annotated[Path | None, typer.Option(help="Or a text file, UTF-8.")] = None,
    count: Annotated[
        int, typer.Option(min=1, help="Tokens to run, in evenly spaced windows of the text.")
    ] = TOKENS,
    window: Annotated[int, typer.Option(min=1, help="Tokens a window.")] = WINDOW,
    budget: Annotated[
        str, typer.Option(help="The most the file may take; fewer tokens are run otherwise.")
    ] = "200GiB",
    pack: Annotated[
        Path | None,
        typer.Option(
            help="A pack of the model, of any level, to find the FP4 rows by. Default: the model's "
            "place under ~/.cache/moet/packs; made if it is not there."
        ),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A moet setting; repeatable."),
    ] = None,
    engine: Annotated[
        str, typer.Option(metavar="JSON", help='vLLM\'s engine arguments: {"dtype": "float32"}.')
    ] = "{}",
    force: Annotated[bool, typer.Option("--force", help="Replace what is in the way.")] = False,
) -> None:
    """Run MODEL over a text with its experts at FP4, and keep what reaches them.

    The model runs inside vLLM, its experts in tiers as when it is served, so it needs no more
    memory than serving does. Samples go to disk as they come; a run that is interrupted resumes.

        moet calibrate ./DeepSeek-R1-NVFP4 --text corpus.txt -o r1.calibration
    """
    path = local_checkpoint(model)
    settings = engine_settings(option)
    options = engine_options(engine)
    with Checkpoint.open(path) as checkpoint:
        refuse_biases(checkpoint)
        windows = _windows(checkpoint, tokens, text, count, window, budget)
        metadata = describe(checkpoint, windows)
        settings["pack"] = str(find_pack(path, pack or settings.get("pack"), make=True))
    done = run(path, output, metadata, windows, settings, options, force=force)
    out.print(
        f"calibrated {len(metadata.layers)} layers on {metadata.total:,} tokens: "
        f"[bold]{escape(str(done.path))}[/], {byte_size(done.path.stat().st_size)}",
        soft_wrap=True,
    )


def run(
    model: Path,
    output: Path,
    metadata: Metadata,
    windows: Windows,
    settings: dict[str, Any],
    options: dict[str, Any],
    *,
    force: bool = False,
) -> Calibration:
    """Collects and publishes a calibration under a progress bar."""
    with CalibrationWriter(output, metadata, windows, overwrite=force) as writer:
        if writer.done:
            err.print(f"resuming: {writer.done} of {metadata.windows} windows are on disk")
        if writer.done < metadata.windows:
            log_to_stderr()
            from moet.vllm.collect import calibration_engine, collect

            with (
                calibration_engine(
                    model, settings | {"precision": "fp4"}, metadata.window, options
                ) as llm,
                WindowBar("calibrating", metadata.windows) as bar,
            ):
                collect(llm, writer, windows, bar)
        return writer.finish()


def describe(checkpoint: Checkpoint, windows: Windows) -> Metadata:
    """The metadata of a calibration of `checkpoint` on `windows`."""
    geometry = checkpoint.geometry
    return Metadata(
        schema_version=1,
        writer=f"moet {__version__}",
        model=model_of(checkpoint),
        hidden=geometry.hidden,
        experts=geometry.num_experts,
        top_k=geometry.top_k,
        layers=tuple(la for la in geometry.moe_layers if la not in geometry.mtp_layers),
        windows=windows.ids.shape[0],
        window=windows.ids.shape[1],
        tokens=windows.digest,
    )


def _windows(
    checkpoint: Checkpoint,
    tokens: Path | None,
    text: Path | None,
    count: int,
    window: int,
    budget: str,
) -> Windows:
    geometry = checkpoint.geometry
    row = token_bytes(
        geometry.hidden, geometry.top_k, len(geometry.moe_layers) - len(geometry.mtp_layers)
    )
    affordable = size_rows(budget, name="--budget", rows=count, row_bytes=row)
    if affordable < min(window, count):
        raise CalibrationError(
            f"--budget {budget} holds {affordable:,} tokens of {byte_size(row)} each, less than a "
            f"window of {window:,}.",
            "Raise it, or make the window shorter.",
        )
    stream, path = given_tokens(checkpoint, tokens, text)
    return cut_windows(stream, affordable, window, path)
