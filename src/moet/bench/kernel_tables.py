"""The tables of the GPU kernels: times, what others take, what the profiler says."""

from __future__ import annotations

from collections.abc import Callable

from moet.bench.results import Row
from moet.bench.tables import Column, Pivot, Runs, Table, Tables, number, text

BENCHMARK = "kernels-h200.json"
DECODE_TOKENS = 16
MAIN = "DeepSeek-V4-Flash"
AT_ALL_PRECISIONS = (MAIN, "GLM-5.2", "Kimi-K2.7")


def _shown(row: Row) -> bool:
    """All shapes at 2 bits, the large ones at the other precisions."""
    if row["op"] not in ("decode", "prefill"):
        return False
    return row["precision"] == "base" or row["model"] in AT_ALL_PRECISIONS


def _weights(row: Row) -> str:
    return str(row["precision"]) + (", FP8 activations" if row["activations"] == "fp8" else "")


def _time_and(key: str, digits: int) -> Callable[[Row], str]:
    return lambda row: f"{row['us']:,.{digits}f} ({row[key]:.0%})".replace("%", " %")


def _fastest(row: Row) -> tuple[str, float]:
    """The fastest peer, and its time ÷ ours: of all for 2 bits, of those at 4 bits for FP4."""
    four_bits = row["precision"] in ("mxfp4", "nvfp4")
    ratios = {
        peer: ratio
        for peer, ratio in row["vs"].items()
        if not four_bits or "mxfp4" in peer or "int4" in peer
    }
    return min(ratios.items(), key=lambda item: item[1])


def _ratio(row: Row) -> str:
    peer, ratio = _fastest(row)
    return f"{ratio:.2f} ({peer})"


def _taken_us(row: Row) -> float:
    return float(row["us_several"] if row["decoded"] else row["us_prefill"])


def _other_us(row: Row) -> float:
    return float(row["us_prefill"] if row["decoded"] else row["us_several"])


def _longer(row: Row) -> str:
    return f"{(_taken_us(row) / _other_us(row) - 1) * 100:.0f} %"


def _read_rate(row: Row) -> str:
    """Of each process, where a run has several."""
    rates = row.get("hbm_read_gbps", [])
    return "; ".join(f"{rate:,}" for rate in (rates if isinstance(rates, list) else [rates]))


_SHAPE = (Column("expert shape", text("model")), Column("weights", _weights))

KERNEL_TABLES: Tables = {
    "kernels-decode": Pivot(
        BENCHMARK,
        _SHAPE,
        "tokens",
        _time_and("fraction_of_hbm", 1),
        lambda row: _shown(row) and row["tokens"] <= DECODE_TOKENS,
    ),
    "kernels-many": Pivot(
        BENCHMARK,
        _SHAPE,
        "tokens",
        _time_and("fraction_of_peak", 0),
        lambda row: _shown(row) and row["tokens"] > DECODE_TOKENS,
    ),
    "kernels-pinned": Table(
        BENCHMARK,
        (
            Column("rows in host memory", number("remote_rows")),
            Column("µs", number("us")),
            Column("copying them alone", number("copy_us")),
            Column("limit", number("limit_us")),
        ),
        keep=lambda row: row["op"] == "pinned",
    ),
    "kernels-vs": Pivot(
        BENCHMARK,
        _SHAPE,
        "tokens",
        _ratio,
        lambda row: _shown(row) and "marlin-mxfp4" in row.get("vs", {}),
    ),
    "kernels-vs-short": Pivot(
        BENCHMARK,
        _SHAPE[:1],
        "tokens",
        _ratio,
        lambda row: (
            "marlin-mxfp4" in row.get("vs", {})
            and (row["precision"], row["activations"]) == ("base", "bf16")
            and row["tokens"] in (1, 4, DECODE_TOKENS, 4096)
        ),
    ),
    "kernels-dispatch": Table(
        "dispatch-h200.json",
        (
            Column("expert shape", text("model")),
            Column("weights", text("precision")),
            Column("tokens", number("tokens")),
            Column("launches of 16, µs", number("us_few")),
            Column("of 32", number("us_several")),
            Column("prefill", number("us_prefill")),
            Column("taken", lambda row: "decode" if row["decoded"] else "prefill"),
        ),
        keep=lambda row: row["precision"] == "base" and row["tokens"] in (32, 64, 128, 256),
    ),
    "kernels-dispatch-missed": Table(
        "dispatch-h200.json",
        (
            Column("expert shape", text("model")),
            Column("weights", text("precision")),
            Column("tokens", number("tokens")),
            Column("taken", lambda row: "decode" if row["decoded"] else "prefill"),
            Column("µs", lambda row: f"{_taken_us(row):,.0f}"),
            Column("the other way", lambda row: f"{_other_us(row):,.0f}"),
            Column("longer by", _longer),
        ),
        keep=lambda row: _taken_us(row) > _other_us(row),
    ),
    "kernels-rates": Runs(
        (BENCHMARK, "peers-h200.json", "dispatch-h200.json", "prefill-h200.json"),
        (
            Column("HBM read, GB/s", _read_rate),
            Column("cuBLAS in BF16, TFLOP/s", number("dense_bf16_tflops")),
            Column("host to device, GB/s", number("host_to_device_gbps", 1)),
        ),
    ),
    "kernels-sanitizer": Table(
        "sanitizer-h200.json",
        (
            Column("tool", text("tool")),
            Column("compute-sanitizer", text("version")),
            Column("kernels", text("kernels")),
            Column("tokens", text("tokens")),
            Column("errors", number("errors")),
            Column("", text("note")),
        ),
    ),
    "kernels-ncu": Table(
        "kernels-ncu-h200.json",
        (
            Column("weights", text("precision")),
            Column("tokens", number("tokens")),
            Column("µs", number("us", 1)),
            Column("SM clock, GHz", number("sm_ghz", 2)),
            Column("DRAM busy", number("dram", 0, 1, " %")),
            Column("issue slots busy", number("issue", 0, 1, " %")),
            Column("ALU pipe", number("alu", 0, 1, " %")),
            Column("warps ready a scheduler", number("eligible", 2)),
            Column("a warp's time goes to", text("stalls")),
        ),
    ),
    "kernels-stamps": Table(
        "kernels-stamps.json",
        (
            Column("cycles until", text("reached")),
            Column("1 token", number("cycles_1")),
            Column("16", number("cycles_16")),
        ),
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
            Column("weights", text("precision")),
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
        keep=lambda row: row["model"] == MAIN and row["tokens"] in (1, 16, 4096),
    ),
}
