"""Runs the tests that need an NVIDIA GPU and writes what they said to bench/results/.

    python scripts/gpu_test.py [--out FILE] [PYTEST ARGUMENTS]

The file, gpu-tests-<gpu>.json unless named, has one row a test: its name, outcome and seconds.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

from moet.bench.results import write_result


class Outcomes:
    """Collects each test's outcome: of its call, or of what kept it from being called."""

    def __init__(self) -> None:
        self.rows: list[dict[str, object]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            self.rows.append(
                {
                    "test": report.nodeid,
                    "outcome": report.outcome,
                    "seconds": round(report.duration, 2),
                }
            )


def main() -> int:
    gpu = torch.cuda.get_device_name()
    parser = argparse.ArgumentParser(description=__doc__)
    default = Path("bench/results") / f"gpu-tests-{gpu.split()[-1].lower()}.json"
    parser.add_argument("--out", type=Path, default=default)
    parsed, others = parser.parse_known_args()
    outcomes = Outcomes()
    status = pytest.main(["-q", "-m", "gpu", *(others or ["tests/gpu"])], plugins=[outcomes])
    write_result(parsed.out, outcomes.rows, {"gpu": gpu})
    return int(status)


if __name__ == "__main__":
    raise SystemExit(main())
