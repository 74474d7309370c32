"""Which tables there are: the result file of each, its columns, the rows it keeps."""

from __future__ import annotations

from moet.bench.ahead_tables import AHEAD_TABLES
from moet.bench.family_tables import FAMILY_TABLES
from moet.bench.gate_tables import GATE_TABLES
from moet.bench.kernel_tables import KERNEL_TABLES
from moet.bench.packing_tables import PACKING_TABLES
from moet.bench.plan_tables import PLAN_TABLES
from moet.bench.results import Row
from moet.bench.routing_tables import ROUTING_TABLES
from moet.bench.served_tables import SERVED_TABLES
from moet.bench.tables import Column, Table, Tables, number, text
from moet.bench.tier_tables import TIER_TABLES
from moet.settings import Settings


def settings() -> str:
    """Every setting, with its default and its meaning."""
    lines = ["| setting | default | |", "|---|---|---|"]
    for name, field in Settings.model_fields.items():
        default = "" if field.default is None else f"`{field.default}`".lower()
        lines.append(f"| `{name}` | {default} | {field.description} |")
    return "\n".join(lines)


def _experts(row: Row) -> str:
    """Which experts a row of fidelity is of, in words."""
    name = "reference scheme" if row["level"] is None else f"level {row['level']}"
    return f"{name}, {row['map_percent']:g} % at FP4" if row["map_percent"] else name


TABLES: Tables = {
    **PLAN_TABLES,
    **TIER_TABLES,
    **KERNEL_TABLES,
    **ROUTING_TABLES,
    **AHEAD_TABLES,
    **GATE_TABLES,
    **FAMILY_TABLES,
    **SERVED_TABLES,
    **PACKING_TABLES,
    "settings": settings,
    "kernels-cpu": Table(
        "kernels-cpu.json",
        (
            Column("expert shape", text("shape")),
            Column("weights", text("precision")),
            Column("tokens", number("tokens")),
            Column("µs", number("us")),
            Column("packed GB/s", number("gbps", 2)),
            Column("of read bandwidth", number("fraction_of_read_bandwidth", 0, 100, " %")),
            Column("× dequantize + matmul", number("vs_dequantize", 1)),
        ),
    ),
    "quantizing-cuda": Table(
        "quantizing-cuda.json",
        (
            Column("model", text("model")),
            Column("level", number("level")),
            Column("tokens", number("tokens")),
            Column("seconds a layer", number("layer_seconds", 2)),
            Column("seconds an expert", number("expert_seconds", 2)),
            Column("hours in all", number("model_hours", 1)),
            Column("GPU memory, GiB", number("peak_gib", 2)),
        ),
    ),
    **{
        f"fidelity-{model}": Table(
            f"fidelity-{model}.json",
            (
                Column(model, _experts),
                Column("KL to FP4, nats", number("kl", 3)),
                Column("± s.e.", number("kl_se", 3)),
                Column("change", number("kl_change", 3)),
                Column("± s.e.", number("kl_change_se", 4)),
                Column("same top-1", number("top1", 1, 100, " %")),
                Column("relative RMS", number("rms", 3)),
                Column("bias, ppm", number("bias", 0, 1e6)),
                Column("zeros", number("zeros", 1, 100, " %")),
            ),
        )
        for model in ("tiny-moe", "nano-moe")
    },
}
