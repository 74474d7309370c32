"""What families served on a GPU were compared with."""

from __future__ import annotations

from moet.bench.tables import Column, Table, Tables, number, text

FAMILY_TABLES: Tables = {
    "families-h200": Table(
        "families-h200.json",
        (
            Column("family", text("family")),
            Column("experts in the checkpoint", text("format")),
            Column("tokens", number("tokens")),
            Column("median difference to transformers", number("median_error", 4)),
            Column("that of transformers in BF16", number("median_bf16", 4)),
            Column("ours, with FP4 experts there", number("median_to_fp4", 4)),
        ),
    ),
}
