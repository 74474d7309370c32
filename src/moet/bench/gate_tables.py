"""The tables of what the confidence gate was measured to do."""

from __future__ import annotations

from moet.bench.results import Row
from moet.bench.tables import Column, Table, Tables, number

_WORDS = {"fp4": "FP4", "base": "base"}
_SECOND_PASS = {"none": "", "graph": "a graph", "pieces": "piece by piece"}
_TASKS = {"tasks": "exact answers", "last_word": "last words"}


def _setting(row: Row) -> str:
    kind, _, value = row["setting"].partition("-")
    match kind:
        case "tau":
            return f"gate, τ = {value}"
        case "map":
            return f"map, {value} % at FP4"
    return _WORDS[kind]


def _change(other: str) -> Column:
    def cell(row: Row) -> str:
        if row["setting"] == other:
            return ""
        gained, lost = row[f"gained_on_{other}"], row[f"lost_to_{other}"]
        return f"+{gained} −{lost}, p = {row[f'p_{other}']:.2g}"

    return Column(f"against {_WORDS[other]}", cell)


def _speed(streams: int) -> tuple[Column, ...]:
    """While so many requests are decoded: only tokens that are decided again have a second pass."""
    time = number(f"second_pass_ms_{streams}", 2)
    return (
        Column(f"tok/s, {streams} stream{'s' * (streams > 1)}", number(f"tok_s_{streams}", 0)),
        Column("decided again", number(f"fired_{streams}", 0, 100, " %")),
        Column("a pass, ms", lambda row: time(row) if row[f"gated_{streams}"] else ""),
    )


GATE_TABLES: Tables = {
    "gate-tiny-moe": Table(
        "gate-tiny-moe.json",
        (
            Column("tiny-moe, level 3", _setting),
            Column("KL to FP4, nats", number("kl", 3)),
            Column("± s.e.", number("kl_se", 3)),
            Column("change from base", number("kl_change", 3)),
            Column("± s.e.", number("kl_change_se", 3)),
            Column("same top-1", number("top1", 1, 100, " %")),
            Column("decided again", number("fired", 0, 100, " %")),
        ),
        keep=lambda row: "kl" in row,
    ),
    "gate-answers-tiny-moe": Table(
        "gate-tiny-moe.json",
        (
            Column("tiny-moe, level 3", _setting),
            Column("items", lambda row: f"{row['items']} {_TASKS[row['task']]}"),
            Column("right", number("right", 1, 100, " %")),
            _change("fp4"),
            _change("base"),
        ),
        keep=lambda row: "task" in row,
    ),
    "gate-nano-moe-h200": Table(
        "gate-nano-moe-h200.json",
        (
            Column("nano-moe, level 0, H200", _setting),
            Column("KL to FP4, nats", number("kl", 3)),
            Column("± s.e.", number("kl_se", 3)),
            Column("same top-1", number("top1", 1, 100, " %")),
            Column("decided again", number("fired", 0, 100, " %")),
        ),
        keep=lambda row: row["second_pass"] != "pieces",
    ),
    "gate-speed-nano-moe-h200": Table(
        "gate-nano-moe-h200.json",
        (
            Column("nano-moe, level 0, H200", _setting),
            Column("second pass", lambda row: _SECOND_PASS[row["second_pass"]]),
            *(column for streams in (1, 16) for column in _speed(streams)),
        ),
    ),
}
