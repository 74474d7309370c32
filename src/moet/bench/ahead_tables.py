"""The tables of reading rows ahead of their use."""

from __future__ import annotations

from collections.abc import Callable

from moet.bench.results import Row
from moet.bench.tables import Column, Table, Tables, number, text


def _guess(source: str, first: int) -> Callable[[Row], str]:
    """The share of remote rows that a guess names, and rows that it names in vain for each."""

    def cell(row: Row) -> str:
        found, vain = row[source][first : first + 2]
        return f"{found:.0%} / {vain:.2f}".replace("%", " %")

    return cell


def _times(row: Row) -> str:
    return f"{row['ms'] / row['ms_ahead']:.2f} ×"


def _prefetch(name: str) -> Table:
    return Table(
        f"prefetch-{name}.json",
        (
            Column("read from", text("read")),
            Column("rows in memory", number("in_memory", 0, 1, " %")),
            Column("streams", number("streams")),
            Column("rows read a step", number("rows_from_disk", 1)),
            Column("ms", number("ms", 1)),
            Column("ms, read ahead", number("ms_ahead", 1)),
            Column("", _times),
        ),
    )


AHEAD_TABLES: Tables = {
    "prefetch-cpu": _prefetch("cpu"),
    "prefetch-h200": _prefetch("h200"),
    "prediction": Table(
        "prediction.json",
        (
            Column("model", text("model")),
            Column("in GPU memory", number("hot", 0, 1, " %")),
            Column("streams", number("streams")),
            Column("remote rows a layer", number("remote", 1)),
            Column("named by top-k of the residual / in vain", _guess("residual", 0)),
            Column("by twice as many", _guess("residual", 2)),
            Column("by top-k of the layer's input", _guess("input", 0)),
            Column("by twice as many of it", _guess("input", 2)),
        ),
        lambda row: "model" in row,
    ),
    "guessing-h200": Table(
        "guessing-h200.json",
        (
            Column("case", text("case")),
            Column("streams", number("streams")),
            Column("tokens/s without", number("tok_s")),
            Column("with guesses", number("tok_s_guessing")),
            Column("remote rows a step without", number("remote_rows", 1)),
            Column("with guesses", number("remote_rows_guessing", 1)),
        ),
        lambda row: "case" in row,
    ),
    "guessing-profile-h200": Table(
        "guessing-h200.json",
        (
            Column("", text("part")),
            Column("µs without", number("us", 1)),
            Column("with guesses", number("us_guessing", 1)),
        ),
        lambda row: "part" in row,
    ),
    "prediction-worth": Table(
        "prediction.json",
        (
            Column("case", text("case")),
            Column("streams", number("streams")),
            Column("ms a step", number("ms", 1)),
            Column("remote rows a step", number("remote", 1)),
            Column("time to copy in, µs a layer", number("gap_us")),
            Column("faster at best", number("at_best", 2, 1, " ×")),
            Column("expected", number("expected", 2, 1, " ×")),
        ),
        lambda row: "case" in row,
    ),
}
