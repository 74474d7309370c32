"""`moet map`: which experts run at FP4 always, by how much their 2-bit base costs the model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from moet.calibrate import Calibration
from moet.calibrate.sensitivity import Sensitivity, choose, measure
from moet.checkpoints import Checkpoint
from moet.checkpoints.local import local_checkpoint
from moet.cli.levels import open_calibration, swiglu_of
from moet.cli.ui import err, out
from moet.errors import ConfigError
from moet.pack import Pack, PackRowSource
from moet.pack.files import write_file
from moet.residency.sizing import size_rows
from moet.settings import default_pack_path
from moet.units import byte_size
from moet.vllm.precision import named_map


def make_map(
    model: Annotated[
        str,
        typer.Argument(help="A checkpoint directory, or a hub name that is downloaded already."),
    ],
    calibration: Annotated[Path, typer.Option(help="What `moet calibrate` made of this model.")],
    output: Annotated[
        str,
        typer.Option(
            "--output", "-o", help="The map: a name, to keep it beside the pack, or a .json file."
        ),
    ],
    budget: Annotated[
        str,
        typer.Option(
            help='Room for the experts at FP4: a share of all experts ("10%"), bytes of their FP4 '
            'rows ("12GiB"), or a number of experts ("512").'
        ),
    ] = "10%",
    pack: Annotated[
        Path | None,
        typer.Option(
            help="The pack that the map is for. Default: the model's place under "
            "~/.cache/moet/packs."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace what is in the way.")] = False,
) -> None:
    """Choose the experts of MODEL that are worth their FP4 rows, under a budget.

    Each expert's outputs at 2 bits are compared with those at FP4 on the calibration's tokens;
    what counts is the error that reaches the model, so experts that are used much, and those that
    2 bits serve badly, come first. Serve with the map as the precision:

        moet map ./DeepSeek-R1-NVFP4 --calibration r1.calibration --budget 12GiB -o twelve
        moet serve ./DeepSeek-R1-NVFP4 --precision twelve
    """
    with Checkpoint.open(local_checkpoint(model)) as checkpoint:
        opened = open_calibration(calibration, checkpoint)
        made = Pack.open(pack or default_pack_path(checkpoint.name, checkpoint.identity))
        path = map_file(output, made.path, force=force)
        count, row_bytes = experts_within(budget, opened, made)
        with PackRowSource(made, checkpoint) as source:
            sensitivity = measure(opened, made, source, swiglu_of(checkpoint), _progress)
        write_map(path, checkpoint.identity, sensitivity, count)
    total = sensitivity.error.size
    share = sum(sorted(sensitivity.error.reshape(-1), reverse=True)[:count])
    out.print(
        f"[bold]{escape(str(path))}[/]: {count} of {total} experts at FP4, "
        f"{byte_size(count * row_bytes)} of rows, which cause "
        f"{share / math.fsum(sensitivity.error.reshape(-1)):.0%} of the base's error",
        soft_wrap=True,
    )


def map_file(output: str, pack: Path, *, force: bool) -> Path:
    """The file that `--output` stands for; raises ConfigError when it is in the way."""
    path = Path(output)
    if path.suffix != ".json":
        if path.name != output or output in ("base", "fp4"):
            raise ConfigError(f"{output!r} is no name for a map.", "Choose a name, or FILE.json.")
        path = named_map(pack, output)
    if path.exists() and not force:
        raise ConfigError(f"{path} exists already.", "Choose another name, or add --force.")
    return path


def experts_within(budget: str, calibration: Calibration, pack: Pack) -> tuple[int, int]:
    """How many experts the budget allows, and the bytes of an FP4 row."""
    layouts = [pack.layers[layer].layout.fp4 for layer in calibration.metadata.layers]
    row_bytes = max(layout.row_bytes for layout in layouts)
    rows = len(layouts) * calibration.metadata.experts
    return size_rows(budget, name="--budget", rows=rows, row_bytes=row_bytes), row_bytes


def write_map(path: Path, identity: str, sensitivity: Sensitivity, count: int) -> None:
    """Writes the file that the setting `precision` takes (`vllm.precision.PrecisionMap`)."""
    chosen = {str(layer): experts for layer, experts in choose(sensitivity, count).items()}
    content = {"model": identity, "default": "base", "fp4": chosen}
    path.parent.mkdir(exist_ok=True)
    write_file(path, (json.dumps(content, indent=1) + "\n").encode())


def _progress(done: int, total: int) -> None:
    err.print(f"measuring: {done} of {total} layers")
