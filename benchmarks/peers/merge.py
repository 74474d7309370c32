"""Puts the peers' times into our kernels' result file, as ratios.

    python -m benchmarks.peers.merge bench/results/kernels-h200.json PEERS.json [PEERS.json …]

A kernels row gets `vs: {peer: the peer's time ÷ ours}` (above 1, ours is faster) for each peer
timed on the same model and number of tokens, unless it is of a routing of its own (`pinned`). All
files must name the same GPU and the same run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moet.bench.results import read_result
from moet.errors import MoetError

Result = dict[str, Any]


def merge(kernels: Result, peers: Sequence[Result]) -> Result:
    """`kernels` with `vs` in its rows; ratios of an earlier merge are replaced.

    Raises MoetError where the files are of different GPUs or runs, or name no run.
    """
    for key in ("gpu", "run_id"):
        values = [result.get("environment", {}).get(key) for result in (kernels, *peers)]
        if not values[0] or any(value != values[0] for value in values):
            raise MoetError(
                f"the result files' {key} differ: {', '.join(map(str, values))}.",
                "Times are compared within one run only: measure both with one --run-id.",
            )
    times: dict[tuple[str, int], dict[str, float]] = {}
    for result in peers:
        for row in result["rows"]:
            times.setdefault((row["model"], row["tokens"]), {})[row["peer"]] = row["us"]
    rows = []
    for row in kernels["rows"]:
        case = row["model"], row["tokens"]
        beside = times.get(case, {}) if row["op"] != "pinned" else {}
        ratios = {peer: round(us / row["us"], 3) for peer, us in sorted(beside.items())}
        own = {key: value for key, value in row.items() if key != "vs"}
        rows.append(own | ({"vs": ratios} if ratios else {}))
    return kernels | {"rows": rows}


def write(path: Path, result: Result) -> None:
    """As `moet.bench.results.write_result` lays files out, but rows are without spaces."""
    head = json.dumps({k: v for k, v in result.items() if k != "rows"}, indent=1)
    rows = (json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in result["rows"])
    lines = ",\n".join("  " + row for row in rows)
    opening = head.removesuffix("\n}")
    path.write_text(f'{opening},\n "rows": [\n{lines}\n ]\n}}\n')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kernels", type=Path)
    parser.add_argument("peers", type=Path, nargs="+")
    arguments = parser.parse_args()
    merged = merge(read_result(arguments.kernels), [read_result(p) for p in arguments.peers])
    write(arguments.kernels, merged)
    print(f"{arguments.kernels}: {sum('vs' in row for row in merged['rows'])} rows have ratios")


if __name__ == "__main__":
    main()
