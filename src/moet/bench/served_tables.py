"""What `moet bench` and `moet eval` said of the embedded model."""

from __future__ import annotations

from moet.bench.tables import Column, Table, Tables, number, text


def _evaluated(source: str) -> Table:
    return Table(
        source,
        (
            Column("nano-moe, level 0", text("segment")),
            Column("tokens", number("tokens")),
            Column("loss at FP4", number("nll_reference", 3)),
            Column("loss", number("nll", 3)),
            Column("change", number("nll_change", 3)),
            Column("± s.e.", number("nll_change_se", 3)),
            Column("same top-1", number("top1", 1, 100, " %")),
            Column("± s.e.", number("top1_se", 1, 100, " %")),
            Column("KL to FP4 ≥", number("kl", 3)),
            Column("± s.e.", number("kl_se", 3)),
        ),
    )


def _benched(source: str) -> Table:
    return Table(
        source,
        (
            Column("streams", number("streams")),
            Column("tokens/s", number("tok_s", 1)),
            Column("ms a token", number("ms", 1)),
            Column("p99", number("p99_ms", 1)),
            Column("first token, ms", number("first_ms")),
            Column("expert rows, GB/s", number("expert_gbps", 2)),
            Column("found in the fastest tier", number("hit_rate", 1, 100, " %")),
            Column("others a step", number("remote_rows", 1)),
            Column("waited for disk, ms a step", number("waited_ms", 2)),
        ),
    )


SERVED_TABLES: Tables = {
    "bench-nano-moe": _benched("bench-nano-moe.json"),
    "bench-nano-moe-h200": _benched("bench-nano-moe-h200.json"),
    "eval-nano-moe": _evaluated("eval-nano-moe.json"),
    "eval-nano-moe-h200": _evaluated("eval-nano-moe-h200.json"),
}
