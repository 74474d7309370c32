"""`moet plan`: what fits, where, and how fast, before anything is downloaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from moet.cli.plan_tables import show
from moet.cli.ui import emit_json, err, out
from moet.errors import ConfigError
from moet.plan.advice import advise
from moet.plan.curve import curve, plot
from moet.plan.detect import detect
from moet.plan.inventory import Inventory, take_inventory
from moet.plan.machine import GIB, Machine, parse_bytes, parse_disk, parse_gpus
from moet.plan.measured import assumption
from moet.plan.model_files import open_model
from moet.plan.plan import default_workload, make_plan
from moet.plan.recipe import recipe_of
from moet.plan.workload import Workload

# Exit code when the model cannot be served on the hardware, or not with that context.
DOES_NOT_FIT = 3
_ASSUMED_RAM = 64 * GIB


def plan(
    model: Annotated[
        str, typer.Argument(help="A checkpoint directory, or a hub name (nothing is downloaded).")
    ],
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="NAME×n",
            help='GPUs: "5090", "RTX PRO 6000×2", "4x H200", "24GiB:1000GB/s", or "none". '
            "Default: those of this machine.",
        ),
    ] = None,
    ram: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Host memory: 64GiB. Default: this machine's."),
    ] = None,
    disk: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE[:RATE]", help="Free disk and its reading bandwidth: 2TB:7GB/s, or either."
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tokens a request may have. Default: the model's, at most 32,768."
        ),
    ] = None,
    streams: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 1,
    kv_cache_dtype: Annotated[
        str, typer.Option(help="vLLM's option of that name: auto, bfloat16 or fp8.")
    ] = "auto",
    drafts: Annotated[
        int, typer.Option(min=0, max=8, help="Tokens that the model's MTP layers draft a step.")
    ] = 0,
    base_pool: Annotated[
        str, typer.Option(help="Room for 2-bit rows: auto, a share (25%), bytes (12GiB), or slots.")
    ] = "auto",
    routing: Annotated[
        str,
        typer.Option(
            metavar="E:R,…",
            help='What is known of the routing: "19:96" when 19 % of the experts get 96 % of it.',
        ),
    ] = "",
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit on the hub. Default: main.")
    ] = None,
    recipe: Annotated[
        Path | None, typer.Option(metavar="FILE.yaml", help="Write the recipe there.")
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(
            "--plot", metavar="FILE.png", help="Draw tokens/s over the pool's size there."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Plan MODEL for some hardware: what fits in which tier, how fast, and the recipe to serve it.

    Reads config.json and the headers of the safetensors files only: of a local directory, or over
    the network. Predictions are ranges; docs/planner.md says what they are made of.

        moet plan deepseek-ai/DeepSeek-V4-Flash --gpu 5090 --ram 64GiB

    Exit code 3 means that the model cannot be served that way; the plan says what is missing.
    """
    machine = _machine(gpu, ram, disk)
    files = open_model(model, revision=revision)
    inventory = take_inventory(files)
    workload = _workload(inventory, machine, context, streams, kv_cache_dtype, drafts)
    workload = replace(workload, base_pool=base_pool, routing=routing)
    made = make_plan(files, inventory, machine, workload)
    advice = advise(made)
    ready = recipe_of(made, str(Path(model).resolve()) if files.local else model)
    if picture is not None and made.decode is not None:
        plot(made, curve(made), picture)
    if recipe is not None and ready is not None:
        _write(recipe, ready.to_yaml())
    if as_json:
        emit_json(
            made.to_json()
            | {
                "advice": [
                    {"change": one.change, "decode_typical": float(f"{one.decode.typical:.4g}")}
                    for one in advice
                ],
                "recipe": None if ready is None else ready.model_dump(mode="json"),
            }
        )
    else:
        for table in show(made, advice, ready):
            out.print(table)
    if made.missing:
        for sentence in made.missing if as_json else ():
            err.print(sentence, soft_wrap=True)
        raise typer.Exit(DOES_NOT_FIT)


def _workload(
    inventory: Inventory,
    machine: Machine,
    context: int | None,
    streams: int,
    kv_dtype: str,
    drafts: int,
) -> Workload:
    default = default_workload(inventory, machine)
    if drafts and not inventory.geometry.mtp_layers:
        raise ConfigError("--drafts: this checkpoint has no MTP layers.", "Leave it out.")
    limit = inventory.text.get("max_position_embeddings")
    if context is not None and isinstance(limit, int) and context > limit:
        raise ConfigError(
            f"--context {context:,} is more than the model's {limit:,} tokens.",
            "Choose a smaller one.",
        )
    return replace(
        default,
        context=context or default.context,
        streams=streams,
        kv_dtype=kv_dtype,
        drafts=drafts,
    )


def _machine(gpu: str | None, ram: str | None, disk: str | None) -> Machine:
    """The named hardware; what is not named is this machine's, or assumed where GPUs are named."""
    here = detect()
    machine = here
    if gpu is not None and gpu.strip().lower() == "none":
        machine = replace(here, gpu=None, count=0, notes=())
    elif gpu is not None:
        product, count = parse_gpus(gpu)
        notes = () if ram else (f"{_ASSUMED_RAM // GIB} GiB of host memory are assumed (--ram).",)
        anywhere = replace(here.disk, free=None, bandwidth=assumption("disk_gb_s").times(1e9))
        machine = Machine(
            product, count, _ASSUMED_RAM, here.ram_bandwidth, here.cores, anywhere, notes
        )
    if ram is not None:
        machine = replace(machine, ram=parse_bytes(ram, "--ram"))
    if disk is not None:
        machine = replace(machine, disk=parse_disk(disk))
    return machine


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise ConfigError(f"--recipe {path}: cannot be written: {error.strerror}.") from None
