"""The planner's predictions beside what was measured.

    python -m benchmarks.plan_check

For the rows of bench/results/residency-h200.json with everything in memory, what `moet plan` says
of the same model, pool and routing on an H200. (Where rows are on disk, the disk alone sets the
pace.) Writes bench/results/plan-check.json.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks.synthetic import EXPERTS, HOT_EXPERTS, HOT_SHARE, LAYERS
from moet.bench.results import Row, read_result, write_result
from moet.plan.inventory import take_inventory
from moet.plan.machine import GIB, Machine, host_bandwidth, parse_disk, parse_gpus
from moet.plan.model_files import open_model
from moet.plan.plan import default_workload, make_plan
from tests.plan.headline import synthetic

RESULTS = Path("bench/results")
CONTEXT = 1024  # tokens; the runs' are shorter, and their KV cache hardly counts
CHUNK = 8192
ROUTING = f"{100 * HOT_EXPERTS / EXPERTS}:{100 * HOT_SHARE}"
POOLS = {"all-hbm": "auto", "hbm50": "50%", "hbm19": "19%"}


def compare(directory: Path) -> list[Row]:
    """The rows; `directory` is for the model's headers."""
    files = open_model(str(synthetic(directory / "model")))
    inventory = take_inventory(files)
    product, count = parse_gpus("H200")
    machine = Machine(product, count, 128 * GIB, host_bandwidth(16), 16, parse_disk("1TB"))
    rows: list[Row] = []
    for measured in read_result(RESULTS / "residency-h200.json")["rows"]:
        op, pool = measured["op"], POOLS.get(measured["case"])
        if op not in ("decode", "prefill") or pool is None or measured["layers"] != LAYERS:
            continue
        workload = replace(
            default_workload(inventory, machine),
            streams=measured["streams"], base_pool=pool, chunk=CHUNK, routing=ROUTING,
            context=CONTEXT if op == "decode" else CHUNK,
        )  # fmt: skip
        plan = make_plan(files, inventory, machine, workload)
        prediction = plan.decode if op == "decode" else plan.prefill
        assert prediction is not None
        rate = prediction.rate
        rows.append(
            {
                "case": measured["case"],
                "op": op,
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
