"""Which tables there are: the result file of each, its columns, the rows it keeps."""

from __future__ import annotations

from moet.bench.plan_tables import PLAN_TABLES
from moet.bench.results import Row
from moet.bench.tables import Column, Table, Tables, number, text
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
    "kernels-h200": Table(
        "kernels-h200.json",
        (
            Column("expert shape", text("model")),
            Column("weights", text("precision")),
            Column("tokens", number("tokens")),
            Column("µs", number("us", 1)),
            Column("GB/s", number("gbps")),
            Column("of HBM read bandwidth", number("fraction_of_hbm", 0, 100, " %")),
        ),
        keep=lambda row: row["op"] == "decode" and row["model"] == "DeepSeek-V4-Flash",
    ),
    "kernels-stamps": Table(
        "kernels-stamps.json",
        (
            Column("cycles until", text("reached")),
            Column("1 token", number("cycles_1")),
            Column("16", number("cycles_16")),
        ),
    ),
    "prefill-history": Table(
        "prefill-history.json",
        (
            Column("version", text("version")),
            Column("predicted", text("predicted")),
            Column("64 tokens, µs", number("us_64")),
            Column("512", number("us_512")),
            Column("4096", number("us_4096")),
            Column("found", text("found")),
        ),
    ),
    "prefill-h200": Table(
        "prefill-h200.json",
        (
            Column("operator", text("op")),
            Column("expert shape", text("model")),
            Column("weights", text("precision")),
            Column("activations", text("activations")),
            Column("tokens", number("tokens")),
            Column("µs", number("us")),
            Column("TFLOP/s", number("tflops")),
            Column("of cuBLAS's BF16 rate", number("fraction_of_peak", 0, 100, " %")),
        ),
    ),
    "peers-h200": Table(
        "peers-h200.json",
        (
            Column("operator", text("peer")),
            Column("weights", text("precision")),
            Column("tokens", number("tokens")),
            Column("µs", number("us", 1)),
            Column("of HBM read bandwidth", number("fraction_of_hbm", 0, 100, " %")),
        ),
        keep=lambda row: row["model"] == "DeepSeek-V4-Flash" and row["tokens"] in (1, 16, 4096),
    ),
    "kernels-history": Table(
        "kernels-history.json",
        (
            Column("version", text("version")),
            Column("predicted", text("predicted")),
            Column("1 token", number("us_1", 1)),
            Column("4", number("us_4", 1)),
            Column("8", number("us_8")),
            Column("16", number("us_16")),
            Column("found", text("found")),
        ),
    ),
    "packing": Table(
        "packing-cpu.json",
        (
            Column("experts in the checkpoint, GB", number("checkpoint_gb", 2)),
            Column("format", text("format")),
            Column("seconds", number("seconds")),
            Column("checkpoint GB/s", number("gb_per_s", 3)),
            Column("million weights/s", number("weights_per_s", 0, 1e-6)),
            Column("peak memory, MB", number("peak_rss_mb")),
        ),
    ),
}
