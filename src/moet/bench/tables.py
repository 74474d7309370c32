"""The tables of the docs, rendered from result files or from the code.

A table stands in a Markdown file between `<!-- table NAME -->` and `<!-- /table -->`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moet.bench.results import Row, read_result
from moet.errors import MoetError

MARK = re.compile(r"(<!-- table (?P<name>[\w-]+) -->\n).*?(<!-- /table -->)", re.DOTALL)
RESULTS = Path("bench/results")


@dataclass(frozen=True)
class Column:
    """One column: its heading, and the text of a row's cell."""

    heading: str
    cell: Callable[[Row], str]


@dataclass(frozen=True)
class Table:
    """A table over the rows of one result file."""

    result: str
    columns: tuple[Column, ...]
    keep: Callable[[Row], bool] = lambda row: True


@dataclass(frozen=True)
class Pivot:
    """A table with a row for each case that the result's rows tell apart by `columns`, and a column
    for each value of the key `across`, with `cell` of the row that has both."""

    result: str
    columns: tuple[Column, ...]
    across: str
    cell: Callable[[Row], str]
    keep: Callable[[Row], bool] = lambda row: True

    def table(self, rows: list[Row]) -> tuple[list[Row], Table]:
        """The rows of the table that it amounts to, and that table."""
        cases: dict[tuple[str, ...], Row] = {}
        for row in rows:
            case = tuple(column.cell(row) for column in self.columns)
            cases.setdefault(case, row | {"cells": {}})["cells"][row[self.across]] = self.cell(row)
        values = sorted({row[self.across] for row in rows})
        more = tuple(
            Column(f"{value:,}", lambda row, v=value: row["cells"].get(v, ""))  # type: ignore[misc]
            for value in values
        )
        return list(cases.values()), Table(self.result, self.columns + more)


@dataclass(frozen=True)
class Runs:
    """A table with a row for each result file: what its run noted of the machine."""

    results: tuple[str, ...]
    columns: tuple[Column, ...]


AnyTable = Table | Pivot | Runs | Callable[[], str]
Tables = Mapping[str, AnyTable]


def number(key: str, digits: int = 0, scale: float = 1.0, unit: str = "") -> Callable[[Row], str]:
    """A cell with a number of the row, `scale` times, with `digits` decimals; blank if absent."""

    def cell(row: Row) -> str:
        value = row.get(key)
        return "" if value is None else f"{float(value) * scale:,.{digits}f}{unit}"

    return cell


def text(key: str) -> Callable[[Row], str]:
    """A cell with the row's own text."""
    return lambda row: str(row.get(key, ""))


def render(table: AnyTable, results: Path = RESULTS) -> str:
    """The Markdown table; with figures, a line that says where they come from follows."""
    if isinstance(table, Runs):
        runs = [read_result(results / name)["environment"] for name in table.results]
        named = Column("run", lambda row: f"`bench/results/{row['run']}`")
        rows = [run | {"run": name} for run, name in zip(runs, table.results, strict=True)]
        return "\n".join(_lines((named, *table.columns), rows))
    if not isinstance(table, (Table, Pivot)):
        return table()
    content = read_result(results / table.result)
    rows = [row for row in content["rows"] if table.keep(row)]
    if not rows:
        raise MoetError(f"{results / table.result}: no rows for this table.")
    if isinstance(table, Pivot):
        rows, table = table.table(rows)
    return "\n".join([*_lines(table.columns, rows), "", _source(table.result, content)])


def _lines(columns: tuple[Column, ...], rows: list[Row]) -> list[str]:
    cells = [[column.cell(row) for column in columns] for row in rows]
    head = "| " + " | ".join(column.heading for column in columns) + " |"
    return [head, "|" + "---|" * len(columns), *("| " + " | ".join(row) + " |" for row in cells)]


def _source(name: str, content: dict[str, Any]) -> str:
    environment = content.get("environment", {})
    where = ", ".join(
        str(environment[key]) for key in ("gpu", "cpu", "cores", "date") if environment.get(key)
    ).replace(f", {environment.get('cores')},", f", {environment.get('cores')} cores,")
    return f"*From `bench/results/{name}` (`{content.get('command', '')}`; {where}).*"


def update(page: str, tables: Tables, results: Path = RESULTS) -> str:
    """`page` with every marked table rendered anew; raises MoetError for an unknown name."""

    def replace(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in tables:
            raise MoetError(f"no table {name!r}; there are {', '.join(sorted(tables))}.")
        return f"{match[1]}{render(tables[name], results)}\n{match[3]}"

    return MARK.sub(replace, page)
