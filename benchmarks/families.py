"""How near to transformers the families are that a GPU serves.

    python -m benchmarks.families [FAMILY …] [--output FILE]

Runs `tests/gpu/test_families.py` for each family (all that are served, unless named), all at the
same time, a process each, and writes what the tests recorded to bench/results/families-<gpu>.json.
Ends with an error when a test failed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from xml.etree import ElementTree

import torch

from moet.bench.results import Row, write_result
from tests.gpu.families import SERVED

TESTS = "tests/gpu/test_families.py"


def main() -> int:
    gpu = torch.cuda.get_device_name()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("families", nargs="*", metavar="FAMILY")
    default = Path("bench/results") / f"families-{gpu.split()[-1].lower()}.json"
    parser.add_argument("--output", type=Path, default=default)
    options = parser.parse_args()
    families = options.families or list(SERVED)
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(len(families)) as pool:
        reports = [Path(directory) / f"{family}.xml" for family in families]
        failed = sum(pool.map(run, families, reports))
        rows = [row for report in reports for row in recorded(report)]
    write_result(options.output, rows, {"gpu": gpu})
    return int(failed > 0)


def run(family: str, report: Path) -> bool:
    """Runs a family's tests and writes pytest's report in JUnit's XML; whether any failed."""
    order = ["-q", f"--junitxml={report}", "-k", f"[{family}] and not loaded", TESTS]
    tests = subprocess.run(
        [sys.executable, "-m", "pytest", *order], stdout=subprocess.PIPE, text=True
    )
    print(f"{family}: {tests.stdout.splitlines()[-1:]}", flush=True)
    if tests.returncode:
        print(tests.stdout, file=sys.stderr, flush=True)
    return tests.returncode != 0


def recorded(report: Path) -> list[Row]:
    """What `record_property` kept of the tests that passed."""
    if not report.exists():  # pytest itself failed
        return []
    rows = []
    for case in ElementTree.parse(report).iter("testcase"):
        row = {of.attrib["name"]: value(of.attrib["value"]) for of in case.iter("property")}
        if row and case.find("failure") is None and case.find("error") is None:
            rows.append(row)
    return rows


def value(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


if __name__ == "__main__":
    sys.exit(main())
