"""`moet`: the entry point. Errors a user can meet end as one message, not as a traceback."""

from __future__ import annotations

import sys

import typer
from rich.markup import escape

from moet import __version__
from moet.cli import bench, calibrate, demo, inspect, pack, plan, serve, simulate, verify
from moet.cli import eval as evaluation
from moet.cli import map as static_map
from moet.cli.ui import err
from moet.errors import MoetError

app = typer.Typer(
    name="moet",
    help="Serve frontier Mixture-of-Experts models on GPUs far too small for them: "
    "routed experts at 2 bits, FP4 where it matters, inside unmodified vLLM.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("pack")(pack.pack)
app.command("calibrate")(calibrate.calibrate)
app.command("map")(static_map.make_map)
app.command("eval")(evaluation.evaluate)
app.command("plan")(plan.plan)
app.command("simulate")(simulate.simulate_trace)
app.command("inspect")(inspect.inspect)
app.command("verify")(verify.verify)
app.command("serve", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(
    serve.serve
)
app.command("bench", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(
    bench.bench
)
app.command("demo")(demo.demo)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"moet {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version and stop."
    ),
) -> None:
    """Options of the command itself."""


def main() -> None:
    try:
        app()
    except MoetError as error:
        err.print(f"[bold red]error:[/] {escape(error.message)}", soft_wrap=True)
        if error.hint:
            err.print(f"       {escape(error.hint)}", soft_wrap=True)
        sys.exit(1)
    except KeyboardInterrupt:
        err.print("stopped")
        sys.exit(130)
