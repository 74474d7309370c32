"""`moet eval`'s result on the screen."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from moet.eval.served import ServedRow


def served_table(title: str, rows: Sequence[ServedRow]) -> Table:
    """A row a segment; errors are standard errors over windows."""
    table = Table(title=escape(title), title_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("text", overflow="fold")
    for heading in ("tokens", "loss at FP4", "loss", "change", "same top-1", "KL ≥"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            escape(row.segment),
            f"{row.tokens:,}",
            f"{row.nll_reference:.2f}±{row.nll_reference_se:.2f}",
            f"{row.nll:.2f}±{row.nll_se:.2f}",
            f"{row.nll_change:+.3f}±{row.nll_change_se:.3f}",
            f"{100 * row.top1:.1f}±{100 * row.top1_se:.1f} %",
            f"{row.kl:.3f}±{row.kl_se:.3f}",
        )
    return table
