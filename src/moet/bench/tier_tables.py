"""The tables of a GPU's tiers: what they add to a step, and how fast they serve."""

from __future__ import annotations

from moet.bench.results import Row
from moet.bench.tables import Column, Table, Tables, number, text

_TABLES = {
    "none": "an empty kernel in place of `ensure`",
    "copied": "`ensure` for a layer",
    "host": "`ensure` after a request, the table read in host memory",
}
_ROWS = {
    "gpu": "all rows in GPU memory",
    "arena": "all rows in the arena",
    "staged": "all rows in the arena, staged",
}


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _what(row: Row) -> str:
    match row["case"]:
        case "ensure":
            tokens = f", {_count(row['tokens'], 'token')}" if "tokens" in row else ""
            return _TABLES[row["table"]] + tokens
        case "request":
            busy = (
                f", beside a busy Python thread, switch interval {row['switch_interval_us']} µs"
                if row["busy_threads"]
                else ""
            )
            return f"request to answer, median (p99){busy}"
        case "waiting":
            return f"waiting {row['when']}"
        case "copy":
            busy = ", beside a busy Python thread" if row["busy_threads"] else ""
            return f"copies {row['way']}, {row['in_flight']} in flight{busy}"
        case "staging":
            return f"staging by {row['blocks']} blocks"
        case "pinning":
            return f"pinning by {_count(row['threads'], 'thread')}"
        case "prefill":
            return f"experts of a layer, {row['tokens']:,} tokens, {_ROWS[row['rows']]}"
    return f"`{row['case']}` of {row['entries']} entries"


def _figure(row: Row) -> str:
    if "median_us" in row:
        return f"{row['median_us']:,.0f} ({row['p99_us']:,.0f}) µs"
    for key, unit in (("us", "µs"), ("gbps", "GB/s"), ("gib_s", "GiB/s"), ("layer_ms", "ms")):
        if key in row:
            return f"{row[key]:g} {unit}"
    return f"{row['core_share']:.0%} of a core"


def _shown(row: Row) -> bool:
    kept: dict[str, bool] = {
        "ensure": row.get("tokens") != 32,
        "publish": row.get("entries") == 6,
        "copy": row.get("in_flight") != 4,
        "staging": row.get("blocks") in (4, 16),
        "pinning": not row.get("fresh") and row.get("threads") in (1, 8),
        "prefill": row.get("tokens") != 1024,
    }
    return bool(kept.get(row["case"], row["case"] != "counts"))


_LAYERS = 43  # of DeepSeek-V4-Flash


TIER_TABLES: Tables = {
    "ensure-h200": Table(
        "ensure-h200.json", (Column("what", _what), Column("figure", _figure)), _shown
    ),
    "booting-cpu": Table(
        "booting-cpu.json",
        (
            Column("", text("way")),
            Column("GiB", number("gib", 2)),
            Column("threads", number("threads")),
            Column("GB/s", number("gb_per_s", 2)),
            Column(
                "time ÷ disk's",
                lambda row: f"{row['time_over_disk']:.2f}" if "time_over_disk" in row else "",
            ),
        ),
    ),
    "residency-h200": Table(
        "residency-h200.json",
        (
            Column("case", text("case")),
            Column("streams", number("streams")),
            Column("tokens/s", number("tok_s")),
            Column("expert rows, GB/s", number("gbps")),
            Column("predicted tokens/s", number("predicted_tok_s")),
            Column("rows found in GPU memory", number("hit_rate", 1, 100, " %")),
            Column("others a step", number("remote_rows_per_step", 1)),
        ),
        lambda row: row["op"] == "decode" and row["layers"] == _LAYERS,
    ),
    "residency-prefill-h200": Table(
        "residency-h200.json",
        (
            Column("case", text("case")),
            Column("prompt tokens/s", number("tok_s")),
            Column("ms", number("ms")),
        ),
        lambda row: row["op"] == "prefill" and row["layers"] == _LAYERS,
    ),
    "residency-memory-h200": Table(
        "residency-h200.json",
        (
            Column("case", text("case")),
            Column("resized in, s", number("resized_s", 1)),
            Column("arena, GiB", number("arena_gib", 1)),
            Column("most of the worker so far, GiB", number("host_peak_gib", 1)),
        ),
        lambda row: row["op"] == "memory" and row["layers"] == _LAYERS,
    ),
    "residency-stock-h200": Table(
        "residency-h200.json",
        (
            Column("case", text("case")),
            Column("", text("op")),
            Column("streams", number("streams")),
            Column("tokens/s", number("tok_s")),
        ),
        lambda row: row["layers"] != _LAYERS and row["op"] != "memory",
    ),
}
