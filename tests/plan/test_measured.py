"""The planner's inputs: sources, and the kernel model against the result files."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from moet.bench.results import read_result
from moet.formats.layout import Precision
from moet.plan.measured import gpu_table, inputs, kernel_model

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def fitting() -> ModuleType:
    spec = importlib.util.spec_from_file_location("plan_inputs", ROOT / "benchmarks/plan_inputs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_input_says_where_it_comes_from() -> None:
    for given in inputs():
        assert any(
            word in given.source for word in ("measured", "published", "assumed", "contract")
        )
    for name, entry in gpu_table().items():
        assert entry["source"], name


def test_the_kernel_model_is_fitted_to_the_result_files(
    fitting: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    stored = json.loads(fitting.TARGET.read_text())
    assert stored == {"gpu": fitting.fit_gpu(), "cpu": fitting.fit_cpu()}


@pytest.mark.parametrize("precision", list(Precision))
def test_the_kernel_model_predicts_what_was_measured(precision: Precision) -> None:
    result = read_result(ROOT / "bench/results/kernels-h200.json")
    model = kernel_model("gpu", precision)
    assert model.worst_error < 0.2
    rows = [  # single launches
        r
        for r in result["rows"]
        if r["op"] == "decode" and r["precision"] == precision.value and r["tokens"] <= 16
    ]
    assert rows
    for row in rows:
        nbytes = row["gbps"] * row["us"] * 1e3
        predicted = model.us(
            row["experts_read"], nbytes, result["environment"]["hbm_read_gbps"] * 1e9
        )
        assert predicted == pytest.approx(row["us"], rel=0.2), row


def test_a_fit_finds_what_made_the_times(fitting: ModuleType) -> None:
    cases = [
        (n, n * size, 10 + 0.5 * n + n * size / (0.8 * 4000e3))
        for n in (4, 16, 64)
        for size in (2e6, 7e6)
    ]
    found = fitting.fit(cases, 4000)
    assert found["launch_us"] == pytest.approx(10, rel=1e-2)
    assert found["row_us"] == pytest.approx(0.5, rel=1e-2)
    assert found["fraction"] == pytest.approx(0.8, rel=1e-2)
    assert found["worst_error"] == 0
