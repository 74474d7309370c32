"""The planner's tables: its plans, its inputs, the GPUs that it knows."""

from __future__ import annotations

from moet.bench.results import Row
from moet.bench.tables import Column, Table, Tables, number, text
from moet.formats.layout import Precision
from moet.plan.measured import gpu_table, inputs, kernel_model


def gpus() -> str:
    """What `hardware.yaml` holds."""
    lines = ["| GPU | memory, GiB | GB/s | PCIe | BF16 TFLOPS | link | source |"]
    lines.append("|" + "---|" * 7)
    for name, gpu in gpu_table().items():
        generation, lanes = gpu["pcie"]
        lines.append(
            f"| {name} | {gpu['memory_mib'] / 1024:.1f} | {gpu['bandwidth']:,} | {generation}.0 × "
            f"{lanes} | {gpu['bf16_tflops']:,} | {gpu['link']} | {gpu['source']} |"
        )
    return "\n".join(lines)


def assumptions() -> str:
    """What `assumptions.yaml` holds."""
    lines = ["| input | low | typical | high | source |", "|---|---|---|---|---|"]
    for one in inputs():
        value = one.value
        lines.append(
            f"| {one.name} | {value.low:g} | {value.typical:g} | {value.high:g} | {one.source} |"
        )
    return "\n".join(lines)


def kernel_fits() -> str:
    """What `kernels.json` holds."""
    lines = [
        "| kernels on | weights | launch, µs | row, µs | fraction | largest error | fitted to |"
    ]
    lines.append("|" + "---|" * 7)
    for device in ("gpu", "cpu"):
        for precision in Precision:
            fit = kernel_model(device, precision)
            lines.append(
                f"| {fit.device} | {precision.value} | {fit.launch_us:.2f} | {fit.row_us:.2f} | "
                f"{fit.fraction:.2f} | {fit.worst_error * 100:.0f} % | `{fit.source}` |"
            )
    return "\n".join(lines)


def _rate(kind: str) -> Column:
    def cell(row: Row) -> str:
        if row.get("missing"):
            return "does not fit" if kind == "decode" else ""
        low, typical, high = (row[f"{kind}_{end}"] for end in ("low", "typical", "high"))
        return f"{typical:,g} ({low:,g} to {high:,g})"

    return Column(f"{kind}, tokens/s", cell)


def _published(row: Row) -> str:
    if "published_decode" not in row:
        return ""
    prefill = row["published_prefill"]
    return f"{row['published_decode']:g}" + (f" / {prefill:,g}" if prefill else "")


def _missing_or_limit(row: Row) -> str:
    return row["missing"] or f"{row['decode_limit']}; {row['prefill_limit']}"


PLAN_TABLES: Tables = {
    "gpus": gpus,
    "plan-inputs": assumptions,
    "plan-kernels": kernel_fits,
    "plan-check": Table(
        "plan-check.json",
        (
            Column("case", text("case")),
            Column("", text("op")),
            Column("streams", number("streams")),
            Column("measured, tokens/s", number("measured")),
            Column("predicted", number("predicted")),
            Column("range", lambda row: f"{row['low']:,.0f} to {row['high']:,.0f}"),
            Column("predicted ÷ measured", number("ratio", 2)),
        ),
    ),
    "plans": Table(
        "plans.json",
        (
            Column("model", text("model")),
            Column("hardware", text("hardware")),
            Column("RAM, GiB", number("ram_gib")),
            Column("2-bit base, GiB", number("base_gib", 2)),
            Column("in GPU memory", number("pool", 0, 100, " %")),
            Column("in RAM", number("arena", 0, 100, " %")),
            Column("on disk", number("disk", 0, 100, " %")),
            _rate("decode"),
            _rate("prefill"),
            Column("limits (decode; prefill), or what is missing", _missing_or_limit),
            Column("published decode / prefill", _published),
            Column("published with", text("published_with")),
        ),
    ),
    "planning": Table(
        "planning.json",
        (
            Column("model", text("model")),
            Column("tensors", number("tensors")),
            Column("seconds", number("seconds", 1)),
            Column("CPU seconds", number("cpu_seconds", 1)),
            Column("seconds of headers alone", number("header_seconds", 1)),
            Column("peak memory, MB", number("peak_rss_mb")),
        ),
    ),
}
