"""What `moet eval` said of the embedded model."""

from __future__ import annotations

from moet.bench.tables import Column, Table, Tables, number, text

EVAL_TABLES: Tables = {
    "eval-nano-moe": Table(
        "eval-nano-moe.json",
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
    ),
}
