"""The docs' tables: rendered from result files, stale ones noticed."""

from __future__ import annotations

from pathlib import Path

import pytest

from moet.bench.results import read_result, write_result
from moet.bench.tables import Column, Pivot, Runs, Table, number, text, update
from moet.errors import MoetError

TABLE = Table("r.json", (Column("case", text("case")), Column("GB/s", number("rate", 1))))
PAGE = "before\n<!-- table t -->\nold\n<!-- /table -->\nafter\n"


@pytest.fixture
def results(tmp_path: Path) -> Path:
    write_result(tmp_path / "r.json", [{"case": "a", "rate": 1234.56}, {"case": "b"}])
    return tmp_path


def test_a_table_holds_the_result_files_figures(results: Path) -> None:
    page = update(PAGE, {"t": TABLE}, results)
    assert "| a | 1,234.6 |" in page
    assert "| b |  |" in page
    assert "old" not in page
    assert page.startswith("before\n")
    assert page.endswith("after\n")
    assert "r.json" in page
    assert update(page, {"t": TABLE}, results) == page


def test_a_pivot_has_a_column_for_each_value(tmp_path: Path) -> None:
    rows = [("a", 4, 1.5), ("b", 1, 2.5), ("a", 1, 3.5)]
    write_result(tmp_path / "r.json", [{"case": c, "n": n, "us": us} for c, n, us in rows])
    pivot = Pivot("r.json", (Column("case", text("case")),), "n", number("us", 1))
    page = update(PAGE, {"t": pivot}, tmp_path)
    assert "| case | 1 | 4 |\n|---|---|---|\n| a | 3.5 | 1.5 |\n| b | 2.5 |  |\n" in page


def test_a_table_of_runs_has_a_row_for_each_file(results: Path) -> None:
    write_result(results / "q.json", [], {"link": 55.44})
    table = Runs(("q.json", "r.json"), (Column("link, GB/s", number("link", 1)),))
    page = update(PAGE, {"t": table}, results)
    lines = "| run | link, GB/s |\n|---|---|\n| `bench/results/q.json` | 55.4 |\n"
    assert lines + "| `bench/results/r.json` |  |\n" in page


def test_a_result_says_where_it_is_from(results: Path) -> None:
    content = read_result(results / "r.json")
    assert content["environment"]["cores"] >= 1
    assert content["environment"]["versions"]["torch"]
    assert content["command"].startswith("python ")


def test_an_unknown_table_is_an_error(results: Path) -> None:
    with pytest.raises(MoetError, match="no table 't'"):
        update(PAGE, {"other": TABLE}, results)


def test_a_missing_result_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(MoetError, match=r"r\.json"):
        update(PAGE, {"t": TABLE}, tmp_path)


def test_a_table_without_rows_is_an_error(results: Path) -> None:
    empty = Table("r.json", TABLE.columns, keep=lambda row: False)
    with pytest.raises(MoetError, match="no rows"):
        update(PAGE, {"t": empty}, results)
