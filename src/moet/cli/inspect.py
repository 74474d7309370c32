"""`moet inspect`: what is in a pack, and how well it stands for the checkpoint."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from moet.cli.ui import emit_json, out
from moet.pack import PackSummary, inspect_pack
from moet.units import byte_size

CODES = ("+1", "+4", "−1", "−4")  # in the order of the code's two bits
BAR = " ▁▂▃▄▅▆▇█"


def inspect(
    pack: Annotated[Path, typer.Argument(help="A pack (a directory).")],
    projections: Annotated[
        bool, typer.Option("--projections", help="A line for each of gate, up and down.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Show what is in PACK: its origin, its sizes, error and bias of every layer.

    *rms* is the error's size relative to the weights' (‖base − weights‖ / ‖weights‖); *bias* is the
    mean error relative to the mean magnitude: near zero, or every layer pushes the same way.
    Opens the pack, so all but the rows is checked; `moet verify` checks the rows.
    """
    summary = inspect_pack(pack)
    if as_json:
        emit_json(asdict(summary))
        return
    out.print(_head(summary))
    out.print(_layers(summary, projections))


def _head(summary: PackSummary) -> Table:
    table = Table(show_header=False, box=None)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    revision = f", revision {summary.revision}" if summary.revision else ""
    rows = [
        ("model", escape(f"{summary.model}{revision} ({summary.architecture})")),
        ("quantizer", f"{summary.quantizer} (level {summary.level}), by {summary.writer}"),
        ("calibration", summary.calibration or "none"),
        (
            "experts",
            f"{summary.experts:,} of {summary.hidden} × {summary.intermediate} in "
            f"{len(summary.layers)} layers, {summary.weights:,} weights",
        ),
        ("in BF16", byte_size(summary.bf16_bytes)),
        ("in the checkpoint", byte_size(summary.source_bytes)),
        ("at 2 bits", f"{byte_size(summary.base_bytes)}, {_bits(summary):.2f} bits a weight"),
        ("FP4 rows in the pack", byte_size(summary.fp4_bytes) if summary.fp4_bytes else "none"),
        ("slices", f"{summary.slices} (the most tensor parallelism)"),
        ("digest", summary.digest),
    ]
    for name, value in rows:
        table.add_row(f"[bold]{name}[/]", value)
    return table


def _bits(summary: PackSummary) -> float:
    return 8 * summary.base_bytes / summary.weights


def _layers(summary: PackSummary, projections: bool) -> Table:
    table = Table()
    for heading in ("layer", "source", "FP4 rows", "at 2 bits", "rms", "bias", " ".join(CODES)):
        table.add_column(heading, justify="right")
    worst = max(layer.statistics["relative_rms"] for layer in summary.layers)
    for layer in summary.layers:
        table.add_row(
            f"{layer.layer}{' (draft)' if layer.mtp else ''}",
            layer.source_format,
            f"{layer.fp4_precision} ({layer.fp4_stored})",
            byte_size(layer.base_bytes),
            *_errors(layer.statistics, worst),
        )
        for name, statistics in layer.projections.items() if projections else ():
            table.add_row(name, "", "", "", *_errors(statistics, worst), style="dim")
    return table


def _errors(statistics: dict[str, Any], worst: float) -> tuple[str, str, str]:
    rms, counts = statistics["relative_rms"], statistics["codes"]
    bar = BAR[round(8 * rms / worst)] if worst else BAR[0]
    shares = (f"{100 * count / sum(counts):.0f} %" for count in counts)
    return f"{bar} {rms:.4f}", f"{statistics['bias']:+.5f}", " ".join(shares)
