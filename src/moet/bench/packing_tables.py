"""The tables of packing: on the CPU, and on a GPU beside what the disk reads."""

from __future__ import annotations

from moet.bench.results import Row
from moet.bench.tables import Column, Table, Tables, number, text

_COMMON = (
    Column("experts in the checkpoint, GB", number("checkpoint_gb", 2)),
    Column("format", text("format")),
    Column("seconds", number("seconds", 1)),
    Column("checkpoint GB/s", number("gb_per_s", 3)),
)


def _share_of_reading(row: Row) -> str:
    return f"{row['gb_per_s'] / row['read_gb_per_s']:.0%}".replace("%", " %")


def _traffic(row: Row) -> str:
    """Of the checkpoint's disk."""
    gb: float = row["checkpoint_gb"] + (row["pack_gb"] if row["packs"] == "same disk" else 0)
    return f"{gb / row['seconds']:.3f}"


PACKING_TABLES: Tables = {
    "packing": Table(
        "packing-cpu.json",
        (
            *_COMMON,
            Column("million weights/s", number("weights_per_s", 0, 1e-6)),
            Column("peak memory, MB", number("peak_rss_mb")),
        ),
    ),
    "packing-h200": Table(
        "packing-h200.json",
        (
            Column("experts", lambda row: row["model"].split(":")[-1].replace("x", " × ")),
            Column("pack goes to", text("packs")),
            *_COMMON,
            Column("reading alone, GB/s", number("read_gb_per_s", 3)),
            Column("of reading alone", _share_of_reading),
            Column("read and written there, GB/s", _traffic),
            Column("million weights/s", number("weights_per_s", 0, 1e-6)),
            Column("start before, s", number("start_seconds", 1)),
        ),
    ),
}
