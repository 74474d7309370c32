"""A server's rows of a result file, from what vLLM's benchmark and the ranks say."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from moet.bench.load import Load
from moet.bench.results import read_result, write_result
from moet.bench.serving import check_load, described, measured
from moet.errors import ConfigError

LOAD = Load(streams=4, prompt=16, tokens=32, requests=3)
REPORT = {
    "median_tpot_ms": 20.0, "median_ttft_ms": 50.04, "p99_itl_ms": 30.0, "output_throughput": 180.0
}  # fmt: skip


def rank(steps: int, gpu: int, arena: int, disk: int, stall: float = 0.0) -> dict[str, Any]:
    """Of decode's rows of 1 MB each; prompts' rows must not count."""
    counts = {"gpu": gpu, "arena": arena, "disk": disk}
    rows = [
        {"phase": phase, "tier": tier, "rows": n * times, "bytes": n * times * 10**6}
        for tier, n in counts.items()
        for phase, times in (("decode", 1), ("scan", 7))
    ]
    return {"steps": steps, "rows": rows, "stall_seconds": stall}


def test_a_row_is_of_the_steps_between() -> None:
    before = [rank(10, 100, 10, 0), rank(10, 0, 0, 0)]
    after = [rank(110, 900, 160, 50, 0.5), rank(110, 900, 100, 0)]
    row = measured(LOAD, REPORT, before, after)
    assert row["tok_s"] == 200.0  # 4 streams a 20 ms
    assert (row["ms"], row["p99_ms"], row["first_ms"]) == (20.0, 30.0, 50.0)
    assert row["requests"] == 12
    # 800 + 150 + 50 rows of one rank and 900 + 100 of the other in 100 steps.
    assert row["expert_gbps"] == 1.0  # 20 MB in 20 ms
    assert row["hit_rate"] == 0.85
    assert row["remote_rows"] == 3.0
    assert row["waited_ms"] == 5.0


def test_a_model_without_experts_rows_divides_by_nothing() -> None:
    row = measured(LOAD, REPORT, [rank(5, 0, 0, 0)], [rank(5, 0, 0, 0)])
    assert (row["hit_rate"], row["expert_gbps"], row["remote_rows"]) == (1.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("about", "names"),
    [
        ({"max_num_seqs": 3, "max_model_len": 48}, ("--streams 4", "--max-num-seqs 4")),
        ({"max_num_seqs": 4, "max_model_len": 47}, ("--prompt 16", "47", "--max-model-len")),
    ],
)
def test_a_load_that_would_be_queued_or_refused(
    about: dict[str, int], names: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as error:
        check_load(LOAD, about)
    assert all(name in f"{error.value.message} {error.value.hint}" for name in names)
    check_load(LOAD, {"max_num_seqs": 4, "max_model_len": 48})


def test_no_place_of_the_server_goes_into_a_result() -> None:
    settings = {"pack": "/nvme/a", "heat_file": "/nvme/b", "precision": "/maps/tenth", "gate": {}}
    about = {
        "model": "/nvme/models/R1", "revision": "abc", "rows": "f00", "settings": settings,
        "tensor_parallel_size": 2,
    }  # fmt: skip
    found = described(about)
    assert found["model"] == "R1"
    assert found["settings"] == {"precision": "tenth", "gate": {}}
    assert "/" not in str(found)


@pytest.mark.parametrize("key", [["--api-key", "secret"], ["--api-key=secret"]])
def test_no_secret_goes_into_a_result(
    key: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/moet", "bench", *key, "--streams", "2"])
    write_result(tmp_path / "r.json", [])
    command = read_result(tmp_path / "r.json")["command"]
    assert command.startswith("moet bench --api-key")
    assert command.endswith("KEY --streams 2")
    assert "secret" not in command


@pytest.mark.parametrize("program", ["/usr/bin/moet", "/site-packages/moet/__main__.py"])
def test_the_command_is_as_a_user_gives_it(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [program, "plan", "a model"])
    write_result(tmp_path / "r.json", [])
    assert read_result(tmp_path / "r.json")["command"] == "moet plan 'a model'"
