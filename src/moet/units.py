"""Byte counts as people read them."""

from __future__ import annotations


def byte_size(count: float) -> str:
    """A byte count in binary units: `512 B`, `27.0 KiB`, `72.6 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} TiB"
