"""`moet eval`: how far a served model is from itself with its experts at FP4, on a text."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from moet.bench.results import write_result
from moet.calibrate import Windows
from moet.checkpoints import Checkpoint
from moet.checkpoints.local import local_checkpoint
from moet.cli.engine import engine_options, engine_settings, log_to_stderr
from moet.cli.eval_table import served_table
from moet.cli.eval_text import TOKENS, WINDOW, chosen_windows
from moet.cli.serve import find_pack
from moet.cli.ui import check_output, emit_json, out
from moet.cli.windows import WindowBar, vocabulary
from moet.errors import ConfigError
from moet.eval.heldout import HeldOut
from moet.eval.served import ServedRow, compare_served
from moet.pack import Pack
from moet.pack.identity import model_of
from moet.settings import Settings, default_pack_path
from moet.vllm.machine import machine
from moet.vllm.precision import fp4_experts

TOP = 64
LOWER_BOUND = (
    f"KL is a lower bound: it is over the tokens that are among the {TOP} likeliest of both, "
    "everything else as one."
)
# Not for the reference, whose experts all run at FP4 anyway; files are the candidate's.
_CANDIDATE_ONLY = ("prefill_precision", "routing_trace", "heat_file")


def evaluate(
    model: Annotated[
        str,
        typer.Argument(help="A checkpoint directory, or a hub name that is downloaded already."),
    ],
    pack: Annotated[
        Path | None,
        typer.Option(
            help="The pack. Default: the model's place under ~/.cache/moet/packs; made if it is "
            "not there."
        ),
    ] = None,
    precision: Annotated[
        str | None, typer.Option(help="base (2 bits), fp4, or a map's name or file. Default: base.")
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(help="A text file, UTF-8. Default: held-out windows beside the model."),
    ] = None,
    tokens: Annotated[
        Path | None,
        typer.Option(
            help="Or token ids: .npy, or raw little-endian uint16 (uint32 for large vocabularies)."
        ),
    ] = None,
    count: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"Tokens to run, in evenly spaced windows. Default: {TOKENS:,} of a text, all "
            "that are held out.",
        ),
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Tokens a window, of which all but the first are predicted. Default: "
            f"{WINDOW} of a text, held-out windows as they are.",
        ),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any other moet setting; repeatable."),
    ] = None,
    engine: Annotated[
        str, typer.Option(metavar="JSON", help='vLLM\'s engine arguments: {"dtype": "float32"}.')
    ] = "{}",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the result to this JSON file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Compare MODEL as it would be served with itself at FP4, on a text.

    Both run inside vLLM, one after the other, experts in tiers as when they are served: no more
    memory is needed than serving takes. Of every token the loss of both, whether both prefer the
    same one, and the KL. That is a lower bound of the whole KL, since vLLM tells only the 64
    likeliest tokens: those that both name count each by itself, everything else as one token.
    What is compared are prompts, so `prefill_precision` counts.

        moet eval ./DeepSeek-R1-NVFP4 --pack /nvme/r1.moet --text mine.txt
        moet eval ./DeepSeek-R1-NVFP4 --pack /nvme/r1.moet --text mine.txt --precision tenth
    """
    settings = _settings(precision, option)
    given = settings.pop("pack", None)
    options = engine_options(engine)
    check_output(output)
    path = local_checkpoint(model)
    with Checkpoint.open(path) as checkpoint:
        windows = chosen_windows(checkpoint, tokens, text, count, window)
        top = min(TOP, vocabulary(checkpoint))
        place = Path(pack or given or default_pack_path(checkpoint.name, checkpoint.identity))
        at_fp4 = _count_fp4(checkpoint, settings["precision"], place)
        opened = Pack.open(find_pack(path, place, make=True))
        about = _about(checkpoint, opened, windows) | {
            "settings": settings,
            "fp4_experts": at_fp4,
            "engine": options,
            "likeliest": top,
            "note": LOWER_BOUND,
        }
    rows = run(path, settings | {"pack": str(opened.path)}, options, windows, top)
    written = [asdict(row) for row in rows]
    if output is not None:
        write_result(output, written, machine(options.get("tensor_parallel_size", 1)) | about)
    if as_json:
        emit_json(about | {"rows": written})
    else:
        out.print(served_table(f"{about['model']['name']}, {settings['precision']}", rows))
        out.print(LOWER_BOUND, style="dim")


def run(
    model: Path,
    settings: dict[str, Any],
    options: dict[str, Any],
    windows: HeldOut,
    top: int = TOP,
) -> list[ServedRow]:
    """Runs `windows` at FP4 and as `settings` say, under progress bars, and compares.

    options: vLLM's engine arguments. top: tokens to ask vLLM for at a position.
    """
    log_to_stderr()
    from moet.vllm.likeliest import likeliest  # vLLM takes seconds to import

    ids = windows.flat
    reference = {key: value for key, value in settings.items() if key not in _CANDIDATE_ONLY}
    told = []
    for verb, of in (("at FP4", reference | {"precision": "fp4"}), ("as served", settings)):
        with WindowBar(verb, len(ids)) as bar:
            told.append(likeliest(model, of, ids, options, top, bar))
    return compare_served(windows.segments, *told).rows()


def _settings(precision: str | None, option: list[str] | None) -> dict[str, Any]:
    """The candidate's settings; raises ConfigError for those that no prompt would show."""
    settings = {"precision": precision or "base"} | engine_settings(option)
    for key in ("gate", "adaptive"):
        if settings.get(key) is not None:
            raise ConfigError(
                f"--set {key}=…: it acts on tokens that are generated; `moet eval` runs prompts.",
                "Leave it out; --set prefill_precision=fp4 is what acts on prompts.",
            )
    Settings.parse(settings)
    return settings


def _count_fp4(checkpoint: Checkpoint, precision: str, pack: Path) -> int:
    """How many experts run at FP4, those of draft layers aside, which prompts do not reach.

    Raises ConfigError for a precision that is none of this model's, before a pack is made.
    """
    geometry = checkpoint.geometry
    chosen = fp4_experts(precision, geometry, checkpoint.identity, pack)
    return sum(int(of.sum()) for layer, of in chosen.items() if layer not in geometry.mtp_layers)


def _about(checkpoint: Checkpoint, pack: Pack, windows: HeldOut) -> dict[str, Any]:
    """What ties the result to a model, a pack and a text."""
    model = model_of(checkpoint)
    _, count, length = windows.tokens.shape
    return {
        "model": {"name": model.name, "revision": model.revision, "identity": model.source},
        "pack": {"digest": pack.digest, "level": pack.manifest.quantizer.level},
        "windows": {"each": count, "tokens": length, "digest": Windows(windows.flat).digest},
    }
