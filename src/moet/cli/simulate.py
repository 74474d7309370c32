"""`moet simulate`: in which tier rows would be found, by policy and sizes, given a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from moet.cli.ui import emit_json, out
from moet.residency.metrics import Phase
from moet.residency.sizing import size_rows
from moet.residency.tiers.device import Tier
from moet.residency.tiers.options import TierOptions, TierSizes
from moet.residency.tiers.simulate import Simulated, simulate
from moet.residency.tiers.trace import RoutingTrace

_SIZE = '"19%" of the rows, "12GiB", or a number of rows'


def simulate_trace(
    trace: Annotated[Path, typer.Argument(help="A recorded routing trace.")],
    gpu: Annotated[
        list[str] | None, typer.Option("--gpu", help=f"GPU memory: {_SIZE}. May be repeated.")
    ] = None,
    arena: Annotated[
        list[str] | None, typer.Option("--arena", help="Pinned host memory, likewise.")
    ] = None,
    policy: Annotated[
        list[str] | None, typer.Option("--policy", help="lfu, lru or static. May be repeated.")
    ] = None,
    warmup: Annotated[
        int, typer.Option("--warmup", help="First steps: only the heat of a warm start.")
    ] = 0,
    half_life: Annotated[
        float, typer.Option("--half-life", help="Steps in which heat halves.")
    ] = TierOptions.half_life,
    margin: Annotated[
        float, typer.Option("--margin", help="By how much a row must be hotter to take a slot.")
    ] = TierOptions.margin,
    plan_every: Annotated[
        int, typer.Option("--plan-every", help="Steps between decisions.")
    ] = TierOptions.plan_every,
    max_moves: Annotated[
        int, typer.Option("--max-moves", help="Rows that can move in a step.")
    ] = TierOptions.max_moves,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Replay TRACE against every combination of policy and sizes.

    A row that a step uses is in GPU memory, in pinned host memory (read over PCIe), or on disk (the
    step waits). *local* is the share of decode steps that find all rows in GPU memory.
    """
    recorded = RoutingTrace.load(trace)
    results = []
    for name in policy or ["lfu"]:
        options = TierOptions(name, half_life, margin, plan_every, max_moves)
        for slots in gpu or ["5%", "10%", "20%", "40%", "80%"]:
            for places in arena or ["100%"]:
                sizes = TierSizes(
                    _rows("--gpu", slots, recorded), _rows("--arena", places, recorded)
                )
                results.append((name, sizes, simulate(recorded, sizes, options, warmup)))
    if as_json:
        emit_json([_record(name, sizes, found) for name, sizes, found in results])
    else:
        out.print(_table(results, recorded.row_bytes))


def _rows(name: str, setting: str, trace: RoutingTrace) -> int:
    rows = len(trace.layers) * trace.num_experts
    return size_rows(setting, name=name, rows=rows, row_bytes=trace.row_bytes)


def _record(policy: str, sizes: TierSizes, found: Simulated) -> dict[str, Any]:
    return {
        "policy": policy,
        "slots": sizes.slots,
        "places": sizes.places,
        "steps": found.steps,
        "steps_local": found.steps_local,
        "rows": {
            phase.value: {tier.name.lower(): found.rows[phase, tier] for tier in Tier}
            for phase in Phase
        },
        "promotions": found.promotions,
        "demotions": found.demotions,
        "evictions": found.evictions,
    }


def _table(results: list[tuple[str, TierSizes, Simulated]], row_bytes: int) -> Table:
    table = Table(
        caption="share of the rows that decode steps use, and rows a step", box=None, padding=(0, 1)
    )
    headings = ("policy", "slots", "GiB", "places", "GiB", "GPU", "arena", "disk", "local")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for policy, sizes, found in results:
        table.add_row(
            policy,
            f"{sizes.slots:,}",
            f"{sizes.slots * row_bytes / 2**30:.2f}",
            f"{sizes.places:,}",
            f"{sizes.places * row_bytes / 2**30:.2f}",
            f"{found.share(Tier.GPU):.1%}",
            f"{found.share(Tier.ARENA):.1%} {found.per_step(Tier.ARENA):.1f}",
            f"{found.share(Tier.DISK):.1%} {found.per_step(Tier.DISK):.1f}",
            f"{found.steps_local / found.steps:.0%}" if found.steps else "–",
        )
    return table
