"""`moet simulate` on a small trace."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from moet.residency.metrics import Phase
from moet.residency.tiers.trace import RoutingTrace
from tests.cli.conftest import Ran


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """20 steps, 2 layers of 16 experts: two hot rows a layer, and one that differs."""
    steps = [
        (Phase.DECODE, [(layer, [0, 1, 2 + number % 14]) for layer in range(2)])
        for number in range(20)
    ]
    path = tmp_path / "trace.safetensors"
    RoutingTrace.from_steps((1, 2), 16, 1 << 20, steps).save(path)
    return path


def test_table(moet: Callable[..., Ran], trace: Path) -> None:
    ran = moet("simulate", trace, "--gpu", "4", "--gpu", "100%", "--warmup", 4)
    assert ran.code == 0, ran.err
    lines = [line for line in ran.out.splitlines() if "lfu" in line]
    assert lines[0].split()[:6] == ["lfu", "4", "0.00", "32", "0.03", "66.7%"]
    assert lines[1].split()[5:] == ["100.0%", "0.0%", "0.0", "0.0%", "0.0", "100%"]


def test_json(moet: Callable[..., Ran], trace: Path) -> None:
    ran = moet(
        *("simulate", trace, "--gpu", "8MiB", "--arena", "25%"),
        *("--policy", "lru", "--policy", "static", "--json"),
    )
    assert ran.code == 0, ran.err
    lru, static = json.loads(ran.out)
    assert (lru["policy"], static["policy"]) == ("lru", "static")
    assert (lru["slots"], lru["places"], lru["steps"]) == (8, 8, 20)
    assert sum(lru["rows"]["decode"].values()) == 20 * 2 * 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "much"], "--gpu 'much' is not a size"),
        (["--arena", "auto"], "--arena 'auto' is impossible"),
        (["--policy", "best"], "unknown policy 'best'"),
        (["--gpu", "0", "--arena", "3"], "Make the arena at least 5 rows"),
        (["--plan-every", "0"], "plan_every must be at least 1"),
    ],
)
def test_bad_settings(
    moet: Callable[..., Ran], trace: Path, arguments: list[str], message: str
) -> None:
    ran = moet("simulate", trace, *arguments)
    assert ran.code == 1
    assert message in " ".join(ran.err.split())


def test_no_trace(moet: Callable[..., Ran], tmp_path: Path) -> None:
    ran = moet("simulate", tmp_path / "none")
    assert ran.code == 1
    assert "there is no such file" in ran.err
