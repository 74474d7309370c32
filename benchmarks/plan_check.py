"""The planner's predictions beside what was measured.

    python -m benchmarks.plan_check

For the rows of bench/results/residency-h200.json with everything in GPU memory, what `moet plan`
says of the same model on an H200. Writes bench/results/plan-check.json.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from moet.bench.results import Row, read_result, write_result
from moet.plan.inventory import take_inventory
from moet.plan.machine import GIB, Machine, host_bandwidth, parse_disk, parse_gpus
from moet.plan.model_files import open_model
from moet.plan.plan import default_workload, make_plan
from tests.plan.headline import synthetic

RESULTS = Path("bench/results")
CONTEXT = 1024  # tokens; the runs' are shorter, and their KV cache hardly counts


def compare(directory: Path) -> list[Row]:
    """The rows; `directory` is for the model's headers."""
    files = open_model(str(synthetic(directory / "model")))
    inventory = take_inventory(files)
    product, count = parse_gpus("H200")
    machine = Machine(product, count, 128 * GIB, host_bandwidth(16), 16, parse_disk("1TB"))
    rows: list[Row] = []
    for measured in read_result(RESULTS / "residency-h200.json")["rows"]:
        if (measured["op"], measured["case"]) != ("decode", "all-hbm"):
            continue
        workload = replace(
            default_workload(inventory, machine), streams=measured["streams"], context=CONTEXT
        )
        decode = make_plan(files, inventory, machine, workload).decode
        assert decode is not None
        rate = decode.rate
        rows.append(
            {
                "case": measured["case"],
                "streams": measured["streams"],
                "measured": measured["tok_s"],
                "predicted": round(rate.typical, 1),
                "low": round(rate.low, 1),
                "high": round(rate.high, 1),
                "ratio": round(rate.typical / measured["tok_s"], 3),
            }
        )
    return rows


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        write_result(RESULTS / "plan-check.json", compare(Path(directory)))


if __name__ == "__main__":
    main()
