"""The peers' times beside ours: ratios in our result file, failures named."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.kernels_gpu import MODELS
from benchmarks.peers import merge
from benchmarks.peers_gpu import Budget, rows_of
from moet.bench.results import read_result, write_result
from moet.errors import MoetError

RUN = {"gpu": "NVIDIA H200", "run_id": "r1"}


def result(path: Path, rows: list[dict[str, Any]], **extra: str) -> Path:
    write_result(path, rows, RUN | extra)
    return path


@pytest.fixture
def kernels(tmp_path: Path) -> Path:
    return result(
        tmp_path / "kernels.json",
        [
            {"op": "decode", "model": "M", "precision": "base", "tokens": 1, "us": 20.0},
            {"op": "decode", "model": "M", "precision": "mxfp4", "tokens": 1, "us": 40.0},
            {"op": "decode", "model": "M", "precision": "base", "tokens": 2, "us": 30.0},
            {"op": "pinned", "model": "M", "precision": "base", "tokens": 1, "us": 50.0},
        ],
    )


def peer(name: str, tokens: int, us: float, model: str = "M") -> dict[str, Any]:
    return {"peer": name, "model": model, "tokens": tokens, "us": us}


def run_merge(monkeypatch: pytest.MonkeyPatch, *paths: Path) -> list[dict[str, Any]]:
    monkeypatch.setattr(sys, "argv", ["merge", *map(str, paths)])
    merge.main()
    rows: list[dict[str, Any]] = read_result(paths[0])["rows"]
    return rows


def test_rows_of_the_same_model_and_tokens_get_the_ratio(
    kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = result(tmp_path / "one.json", [peer("b", 1, 60.0), peer("a", 1, 30.0, "other model")])
    two = result(tmp_path / "two.json", [peer("a", 1, 10.0), peer("a", 8, 10.0)])
    before = read_result(kernels)
    rows = run_merge(monkeypatch, kernels, one, two)
    assert [row.get("vs") for row in rows] == [
        {"a": 0.5, "b": 3.0}, {"a": 0.25, "b": 1.5}, None, None,
    ]  # fmt: skip
    after = read_result(kernels)
    assert after["environment"] == before["environment"]
    assert [{k: v for k, v in r.items() if k != "vs"} for r in after["rows"]] == before["rows"]
    assert run_merge(monkeypatch, kernels, two)[0]["vs"] == {"a": 0.5}  # the earlier merge is gone


@pytest.mark.parametrize("extra", [{"gpu": "NVIDIA H100"}, {"run_id": "r2"}])
def test_other_gpus_and_runs_are_refused(
    kernels: Path, tmp_path: Path, extra: dict[str, str]
) -> None:
    other = result(tmp_path / "other.json", [peer("a", 1, 10.0)], **extra)
    with pytest.raises(MoetError, match=next(iter(extra))):
        merge.merge(read_result(kernels), [read_result(other)])


def test_a_result_without_a_run_is_refused(tmp_path: Path) -> None:
    unnamed = read_result(result(tmp_path / "k.json", [], run_id=""))
    with pytest.raises(MoetError, match="run_id"):
        merge.merge(unnamed, [unnamed])


def test_a_peer_that_cannot_run_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "humming", None)  # as where it is not installed
    failures: list[dict[str, Any]] = []
    rows = rows_of("humming-mxfp4", MODELS[0], [1], 1.0, torch.empty(0), Budget(60), failures)
    assert not list(rows)
    assert failures[0]["peer"] == "humming-mxfp4"
    assert failures[0]["model"] == MODELS[0].name
    assert "humming" in failures[0]["error"]
