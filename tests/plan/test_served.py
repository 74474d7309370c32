"""The planner against vLLM on a GPU: the result file is the planner's of today, and close."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.plan_check import compare
from moet.bench.results import read_result

ROOT = Path(__file__).parents[2]


def test_predictions_are_within_15_percent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    rows = compare(tmp_path)
    assert rows == read_result(ROOT / "bench/results/plan-check.json")["rows"]
    assert rows
    for row in rows:
        assert row["ratio"] == pytest.approx(1, abs=0.15), row
        assert row["low"] < row["measured"] < row["high"]
