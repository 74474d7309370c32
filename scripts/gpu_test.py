"""Runs the tests that need an NVIDIA GPU and writes what they said to bench/results/.

    python scripts/gpu_test.py [--out FILE] [--processes N] [PYTEST ARGUMENTS]

The file, gpu-tests-<gpu>.json unless named, has one row a test: its name, outcome and seconds. With
`--processes`, every N-th test runs in the same process.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

from moet.bench.results import Row, read_result, write_result


class Outcomes:
    """Runs every `step`-th test from `first` on, and collects their outcomes: of a test's call, or
    of what kept it from being called."""

    def __init__(self, first: int, step: int) -> None:
        self.rows: list[Row] = []
        self._mine = slice(first, None, step)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = items[self._mine]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            self.rows.append(
                {
                    "test": report.nodeid,
                    "outcome": report.outcome,
                    "seconds": round(report.duration, 2),
                }
            )


def run_split(processes: int, arguments: list[str]) -> tuple[int, list[Row]]:
    """(the worst status, the rows in the order of the tests), of this script in `processes`."""
    with tempfile.TemporaryDirectory() as directory:
        files = [Path(directory) / f"{first}.json" for first in range(processes)]
        running = [
            subprocess.Popen(
                [sys.executable, __file__, "--out", str(file), "--part", str(first), str(processes),
                 *arguments]
            )
            for first, file in enumerate(files)
        ]  # fmt: skip
        status = max(process.wait() for process in running)
        parts = [read_result(file)["rows"] for file in files]
    longest = max(map(len, parts))
    return status, [part[i] for i in range(longest) for part in parts if i < len(part)]


def main() -> int:
    gpu = torch.cuda.get_device_name()
    parser = argparse.ArgumentParser(description=__doc__)
    default = Path("bench/results") / f"gpu-tests-{gpu.split()[-1].lower()}.json"
    parser.add_argument("--out", type=Path, default=default)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1), help=argparse.SUPPRESS)
    parsed, others = parser.parse_known_args()
    arguments = others or ["tests/gpu"]
    if parsed.processes > 1:
        status, rows = run_split(parsed.processes, arguments)
    else:
        outcomes = Outcomes(*parsed.part)
        status, rows = pytest.main(["-q", "-m", "gpu", *arguments], [outcomes]), outcomes.rows
    write_result(parsed.out, rows, {"gpu": gpu})
    return int(status)


if __name__ == "__main__":
    raise SystemExit(main())
