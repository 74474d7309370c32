"""`moet bench`: how fast a model or a recipe is served on this machine."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from moet.bench.load import Load, send
from moet.bench.results import Row, write_result
from moet.bench.serving import check_load, described, measured
from moet.cli.serve import option_value
from moet.cli.server import Client, Server
from moet.cli.ui import check_output, emit_json, err, out
from moet.errors import ConfigError
from moet.recipes import Recipe, find_recipe

PATIENCE = 3600  # seconds: a large model is read from disk


def bench(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(help="What `moet serve` would serve: a checkpoint, or a recipe."),
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="Measure a server that runs already, at this address.")
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="The server's, if it wants one.")] = None,
    streams: Annotated[
        str, typer.Option(help="Requests at a time; several numbers with commas.")
    ] = "1",
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 512,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of an answer.")] = 128,
    requests: Annotated[
        int, typer.Option(min=1, help="Requests of each stream, one after another.")
    ] = 3,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write a result file.")
    ] = None,
    log: Annotated[Path | None, typer.Option(help="Keep the server's log here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON.")] = False,
) -> None:
    """Measure how fast MODEL is served: tokens a second, and expert bytes beside them.

    Starts `moet serve MODEL`, to which every option that is not listed here goes, and sends it
    random prompts (`vllm bench serve`). Or measures a server that runs, with --url. In the table:
    time of a token after the first, median; of a step, bytes of expert rows ÷ that time, the share
    of the rows that was found in the fastest tier, how many others, and the time that it waited for
    the disk.

        moet bench deepseek-v4-flash-rtx-5090 -o result.json
        moet bench ./nano-moe --base-pool 25% --streams 1,8 --max-model-len 2048
        moet bench --url http://localhost:8000 --api-key secret --streams 1,4,16
    """
    check_output(output)
    loads = [Load(number, prompt, tokens, requests) for number in _numbers(streams)]
    recipe = None if model is None else find_recipe(model)
    rows: list[Row] = []
    with _server(model, url, context.args, log, api_key) as server:
        about = server.get("/v1/moet/about")
        for load in loads:
            check_load(load, about)
        served = server.get("/v1/models")["data"][0]["id"]
        for load in loads:
            err.print(f"measuring {load.streams} streams")
            before = server.get("/v1/moet/stats")["ranks"]
            report = send(server.url, served, about["model"], load, api_key)
            rows.append(measured(load, report, before, server.get("/v1/moet/stats")["ranks"]))
    extra = {**about["machine"], **described(about), **_recipe(model, recipe)}
    if output is not None:
        write_result(output, rows, extra)
    if as_json:
        emit_json({"environment": extra, "rows": rows})
        return
    out.print(_table(rows))
    if recipe is not None and recipe.predicted is not None:
        low, typical, high = recipe.predicted.decode
        out.print(
            f"the recipe expects {typical:,.0f} tokens/s ({low:,.0f} to {high:,.0f}) of all the "
            f"{recipe.vllm.get('max-num-seqs', 'streams')} that it serves at a time"
        )
    if output is not None:
        out.print(f"written: [bold]{escape(str(output))}[/]", soft_wrap=True)


@contextmanager
def _server(
    model: str | None, url: str | None, rest: list[str], log: Path | None, key: str | None
) -> Iterator[Client]:
    if url is not None and rest:
        raise ConfigError(
            f"{' '.join(rest)}: a server that runs already takes no options.",
            "Leave them out, or name a model.",
        )
    if (model is None) == (url is None):
        raise ConfigError(
            "one of MODEL and --url must be given.", "--url measures a server that runs already."
        )
    if url is not None:
        with Client(url, key) as client:
            yield client
        return
    assert model is not None
    for name in ("--host", "--port", "--uds"):
        if option_value(rest, name) is not None:
            raise ConfigError(f"{name}: the server is for this run only.", "Leave it out.")
    with tempfile.TemporaryDirectory(prefix="moet-bench-") as directory:
        place = log or Path(directory) / "server.log"
        err.print(f"starting the server; its log: {escape(str(place))}", soft_wrap=True)
        with Server([model, *rest], place, dict(os.environ), PATIENCE, key) as server:
            yield server


def _numbers(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(f"--streams {text} is no list of numbers.", "For example: --streams 1,8")
    return [int(part) for part in parts]


def _recipe(model: str | None, recipe: Recipe | None) -> dict[str, Any]:
    """The recipe's name, and a hash of what it says."""
    if model is None or recipe is None:
        return {}
    digest = hashlib.blake2b(recipe.to_yaml().encode(), digest_size=8).hexdigest()
    return {"recipe": Path(model).stem, "recipe_hash": digest}


def _table(rows: list[Row]) -> Table:
    table = Table(title="moet bench", title_style="bold")
    for heading in (
        "streams", "tok/s", "ms a token (p99)", "first, ms", "expert GB/s", "in fastest tier",
        "others a step", "disk wait, ms",
    ):  # fmt: skip
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            str(row["streams"]),
            f"{row['tok_s']:,.1f}",
            f"{row['ms']:,.1f} ({row['p99_ms']:,.1f})",
            f"{row['first_ms']:,.0f}",
            f"{row['expert_gbps']:,.2f}",
            f"{row['hit_rate']:.1%}",
            f"{row['remote_rows']:,.1f}",
            f"{row['waited_ms']:,.2f}",
        )
    return table
