"""How `moet plan` shows a plan on the screen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from moet.formats.layout import Precision
from moet.plan.advice import Advice
from moet.plan.inventory import Role
from moet.plan.plan import Plan
from moet.plan.ranges import Range
from moet.plan.speed import Prediction
from moet.plan.workload import DEPTH
from moet.recipes import Recipe
from moet.units import byte_size


def show(plan: Plan, advice: Sequence[Advice], recipe: Recipe | None) -> Iterator[RenderableType]:
    """What is printed, from top to bottom."""
    yield from _head(plan)
    yield _parts(plan)
    yield _tiers(plan)
    yield from _room(plan)
    if plan.missing:
        yield "[bold red]does not fit:[/]"
        yield from (f"  {escape(sentence)}" for sentence in plan.missing)
    if plan.decode is not None and plan.prefill is not None:
        yield _speed(plan, plan.decode, plan.prefill)
        yield from _step(plan, plan.decode)
    if advice:
        yield _advice(plan, advice)
    if recipe is not None:
        yield "\n[bold]recipe[/] (write it with --recipe FILE.yaml, then: moet serve FILE.yaml)"
        yield escape(recipe.to_yaml().rstrip())


def _head(plan: Plan) -> Iterator[str]:
    geometry = plan.inventory.geometry
    yield f"[bold]{escape(plan.model)}[/] on [bold]{escape(plan.machine.name)}[/]"
    yield (
        f"{geometry.architecture}: {plan.inventory.target_layers} layers of {geometry.num_experts} "
        f"experts, {geometry.top_k} a token; {plan.inventory.tensors:,} tensors, "
        f"{byte_size(plan.inventory.checkpoint_bytes)}"
    )
    yield from (f"[dim]{escape(note)}[/]" for note in plan.machine.notes)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    return table


def _parts(plan: Plan) -> Table:
    inventory, tp = plan.inventory, max(1, plan.machine.count)
    held = "in memory" if plan.machine.count < 2 else "on each GPU"
    table = _table("bytes by part", "", "in the checkpoint", held)
    for role in Role:
        part = inventory.parts[role]
        if not part.total:
            continue
        on_rank = plan.need.weights.get(role.value)
        cell = "–" if on_rank is None else byte_size(on_rank)
        table.add_row(role.value, byte_size(part.total), cell)
    row = inventory.layout(Precision.BASE).row_bytes
    table.add_row(
        "  experts at 2 bits", byte_size(plan.base_bytes()), f"{byte_size(plan.need.row)} a row"
    )
    table.add_row(f"  experts at FP4 ({inventory.fp4})", byte_size(plan.fp4_bytes()), "–")
    copies = plan.need.weights.get("attention's copies")
    if copies:
        table.add_row("attention's copies", "–", byte_size(copies))
    cache, work = plan.need.kv_cache, plan.workload
    table.add_row(
        f"KV cache, {work.streams} × {work.context:,} tokens ({work.kv_dtype})",
        f"{byte_size(cache.per_token)} a token",
        byte_size(plan.need.kv),
    )
    for name, nbytes in plan.need.workspace.items():
        table.add_row(name, "–", byte_size(nbytes))
    if tp > 1:
        table.caption = (
            f"{tp} ranks; a row is {byte_size(row)} in all, {byte_size(plan.need.row)} a rank"
        )
    return table


def _tiers(plan: Plan) -> Table:
    placement, machine = plan.placement, plan.machine
    whole = plan.need.row * max(1, machine.count)
    table = _table("where the experts are", "tier", "experts", "share", "bytes")
    pool = "GPU memory" if machine.gpu else "RAM"
    for name, rows in (
        (pool, placement.pool),
        *((("host memory, pinned", placement.arena),) if machine.gpu else ()),
        ("disk only", placement.disk),
    ):
        table.add_row(name, f"{rows:,}", f"{rows / placement.rows:.1%}", byte_size(rows * whole))
    return table


def _room(plan: Plan) -> Iterator[str]:
    peak, ram = byte_size(plan.host_load_peak()), byte_size(plan.machine.ram)
    yield f"host memory while loading: {peak} of {ram}"
    yield f"disk: checkpoint {byte_size(plan.disk.checkpoint)}, pack {byte_size(plan.disk.pack)}"
    yield f"longest context that would fit: {plan.max_context:,} tokens\n"


def _speed(plan: Plan, decode: Prediction, prefill: Prediction) -> Table:
    table = _table("predicted", "", "tokens/s", "typical", "limited by")
    streams = plan.workload.streams
    depth = min(DEPTH, plan.workload.context)
    name = f"decoding, {streams} stream(s) at {depth:,} tokens"
    table.add_row(name, _span(decode.rate), _three(decode.rate.typical), decode.limit)
    name = f"prefill, chunks of {plan.workload.chunk:,}"
    table.add_row(name, _span(prefill.rate), _three(prefill.rate.typical), prefill.limit)
    return table


def _step(plan: Plan, decode: Prediction) -> Iterator[str]:
    causes = sorted(decode.seconds.items(), key=lambda item: -item[1])
    step = ", ".join(f"{cause} {1e3 * seconds:.1f}" for cause, seconds in causes)
    yield f"a decode step, in ms: {step}"
    pool = "GPU memory" if plan.machine.gpu else "RAM"
    yield f"experts found in {pool}: {decode.hits.low:.0%} to {decode.hits.high:.0%}\n"


def _advice(plan: Plan, advice: Sequence[Advice]) -> Table:
    title = "to go faster" if plan.decode is not None else "it would be served with"
    table = _table(title, "change", "decoding, tokens/s", "×")
    for one in advice:
        gain = "" if one.gain is None else f"{one.gain:.2f}"
        table.add_row(escape(one.change), _three(one.decode.typical), gain)
    return table


def _span(rate: Range) -> str:
    return f"{_three(rate.low)} to {_three(rate.high)}"


def _three(value: float) -> str:
    """Three digits: 0.54, 24.8, 1,230."""
    return f"{float(f'{value:.3g}'):,.0f}" if value >= 100 else f"{value:.3g}"
