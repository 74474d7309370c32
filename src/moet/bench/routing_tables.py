"""The table of policies on recorded routings."""

from __future__ import annotations

from moet.bench.results import Row
from moet.bench.tables import Column, Table, Tables, number, text

_POLICIES = {
    "lfu, 16, often": "LFU, half-life 16, decides every 4 steps",
    "lfu, 16": "LFU, 16",
    "lfu, 64": "LFU, 64",
    "lfu, 1024": "LFU, 1,024",
    "lru": "LRU",
    "static": "static",
}


def _found(policy: str) -> Column:
    """Shares of decode's rows in GPU memory and on disk, and rows moved, a step."""

    def cell(row: Row) -> str:
        of = row["policies"][policy]
        return f"{of['gpu']:.1%} / {of['disk']:.1%} / {of['moves']:.1f}".replace("%", " %")

    return Column(_POLICIES[policy], cell)


ROUTING_TABLES: Tables = {
    "routing-policies": Table(
        "routing-policies.json",
        (
            Column("routing of", text("model")),
            Column("requests at once", number("streams")),
            Column("rows a step", number("rows_per_step")),
            Column("GPU slots", number("gpu_percent", 0, 1, " %")),
            *(_found(policy) for policy in _POLICIES),
        ),
    ),
}
