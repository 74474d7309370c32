"""`moet serve`: vLLM's server with the plugin, and the pack found or made."""

from __future__ import annotations

import json
import os
import socket
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any

import typer

from moet.checkpoints import Checkpoint
from moet.checkpoints.local import local_checkpoint
from moet.cli.engine import assignment, json_object
from moet.cli.pack import make_pack
from moet.cli.ui import err
from moet.errors import ConfigError
from moet.pack import Pack
from moet.recipes import find_recipe
from moet.settings import Settings, default_pack_path
from moet.vllm import METHOD

WORKER_EXTENSION = "moet.vllm.worker.MoetWorkerExtension"
ENDPOINTS = "moet_http"
_ADDITIONAL_HELP = 'Give it an object: \'{"moet": {"base_pool": "25%"}}\'.'


def serve(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            help="A checkpoint directory, a hub name that is downloaded already, or a recipe: "
            "FILE.yaml, or the name of one that comes with moet."
        ),
    ],
    pack: Annotated[
        Path | None,
        typer.Option(help="The pack. Default: the model's place under ~/.cache/moet/packs."),
    ] = None,
    precision: Annotated[
        str | None, typer.Option(help="base (2 bits), fp4, or a map's name or file. Default: base.")
    ] = None,
    base_pool: Annotated[
        str | None,
        typer.Option(help="Room for 2-bit rows: auto, a share (25%), bytes (12GiB), or slots."),
    ] = None,
    fp4_pool: Annotated[str | None, typer.Option(help="Room for FP4 rows, likewise.")] = None,
    arena: Annotated[
        str | None,
        typer.Option(help="On a GPU: pinned host memory for the other rows, likewise."),
    ] = None,
    policy: Annotated[
        str | None, typer.Option(help="Which row makes room for a new one: lru, lfu, static.")
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any other moet setting; repeatable."),
    ] = None,
    make: Annotated[
        bool, typer.Option("--make-pack/--no-make-pack", help="Pack the model first if need be.")
    ] = True,
) -> None:
    """Serve MODEL over vLLM's OpenAI-compatible API.

    Every option that is not listed here goes to `vllm serve` as it is. Options given here win over
    those of a recipe.

        moet serve ./nano-moe --base-pool 25% --port 8001 --max-model-len 2048
        moet serve deepseek-v4-flash-rtx-5090 --port 8001
        moet serve ./only-a-config --load-format dummy   (random weights: speed without a model)
    """
    chosen = {
        "precision": precision, "base_pool": base_pool, "fp4_pool": fp4_pool, "arena": arena,
        "policy": policy,
    }  # fmt: skip
    values: dict[str, Any] = {key: value for key, value in chosen.items() if value is not None}
    values |= dict(assignment(text) for text in option or [])
    rest = [_dashed(text) for text in context.args]
    _check_quantization(rest)
    theirs = _take_additional_config(rest)
    Settings.from_additional_config(theirs)
    values = {**theirs.get("moet", {}), **values}
    recipe = find_recipe(model)
    if recipe is not None:
        model = recipe.model
        values = {**recipe.moet, **values}
        rest = [*recipe.vllm_arguments(), *rest]
    Settings.parse(values)
    _check_port(rest)
    path = local_checkpoint(model, recipe.revision if recipe else None)
    pack = pack or values.get("pack")
    if option_value(rest, "--load-format") != "dummy":
        pack = find_pack(path, pack, make=make)
    if pack is not None:
        values["pack"] = str(Path(pack).resolve())
    command = serve_command(str(path), values, theirs, rest)
    os.execve(command[0], command, serve_environment())


def serve_command(
    model: str, values: dict[str, Any], additional_config: dict[str, Any], rest: list[str]
) -> list[str]:
    """The command line of vLLM's server for a model and moet settings."""
    config = json.dumps({**additional_config, "moet": values})
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model]
    command += ["--quantization", METHOD, "--additional-config", config]
    if not any(text.startswith("--worker-extension-cls") for text in rest):
        command += ["--worker-extension-cls", WORKER_EXTENSION]
    return command + rest


def serve_environment() -> dict[str, str]:
    """The environment for vLLM's server: endpoint plugins are loaded only when they are named,
    and naming one means naming every plugin."""
    environment = dict(os.environ)
    named = environment.get("VLLM_PLUGINS")
    general = [entry.name for entry in entry_points(group="vllm.general_plugins")]
    plugins = named.split(",") if named else general
    environment["VLLM_PLUGINS"] = ",".join([*plugins, ENDPOINTS])
    return environment


def _dashed(text: str) -> str:
    """An option's name as vLLM reads it: underscores are dashes."""
    if not text.startswith("--"):
        return text
    name, equals, value = text.partition("=")
    return f"{name.replace('_', '-')}{equals}{value}"


def _take_additional_config(arguments: list[str]) -> dict[str, Any]:
    """Removes vLLM's own --additional-config from `arguments` and returns its content."""
    taken: dict[str, Any] | None = None
    index = 0
    while index < len(arguments):
        name, equals, value = arguments[index].partition("=")
        if name != "--additional-config":
            index += 1
            continue
        if taken is not None:
            raise ConfigError("--additional-config is given twice.", "Put all into one object.")
        del arguments[index]
        if not equals and index == len(arguments):
            raise ConfigError("--additional-config has no value.", _ADDITIONAL_HELP)
        value = value if equals else arguments.pop(index)
        taken = json_object("--additional-config", value, _ADDITIONAL_HELP)
    return taken or {}


def option_value(arguments: list[str], name: str) -> str | None:
    """The value of an option, the last if it is given twice, as vLLM sees it."""
    value = None
    for text, following in zip(arguments, [*arguments, None][1:], strict=True):
        if text == name:
            value = following
        elif text.startswith(f"{name}="):
            value = text.partition("=")[2]
    return value


def _check_quantization(arguments: list[str]) -> None:
    """Refuses another quantization than ours: it would come after it, and vLLM takes the last."""
    for text, following in zip(arguments, [*arguments, ""][1:], strict=True):
        name, _, value = text.partition("=")
        if text.startswith("-q"):  # short options need no space before their value
            name, value = "-q", text[2:].removeprefix("=")
        if name in ("-q", "--quantization") and (value or following) != METHOD:
            raise ConfigError(
                f"{text}: `moet serve` serves with --quantization {METHOD} only.",
                "Leave the option out: the method of the dense layers follows from the "
                "checkpoint. To serve without moet, use `vllm serve`.",
            )


def _check_port(arguments: list[str]) -> None:
    """vLLM binds its port late, after the weights are loaded: a taken one is said now."""
    if option_value(arguments, "--uds"):
        return
    host = option_value(arguments, "--host") or ""
    port = option_value(arguments, "--port") or "8000"
    if not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"--port {port} is not a port number.", "Choose one from 1 to 65535.")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(port)))
        except OSError as error:
            raise ConfigError(
                f"port {port} on {host or 'this machine'} cannot be had: {error.strerror}.",
                "Stop what listens there, or choose another with --port.",
            ) from None


def find_pack(model: Path, pack: str | Path | None, *, make: bool) -> Path:
    """The pack of `model`: the one given, the one in its place, or a new one."""
    with Checkpoint.open(model) as checkpoint:
        path = Path(pack) if pack else default_pack_path(checkpoint.name, checkpoint.identity)
        if (path / "moet.json").exists() or not make:
            Pack.open(path).check_model(checkpoint)
            return path.resolve()
        err.print(f"no pack of {checkpoint.name} in {path}: making it")
        make_pack(checkpoint, path)
    return path.resolve()
