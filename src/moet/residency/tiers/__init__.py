"""Rows in three tiers, GPU memory, pinned host memory and disk: docs/residency.md."""

from moet.residency.tiers.device import (
    Copy,
    Counts,
    Entry,
    Place,
    Request,
    Tier,
    TierDevice,
)
from moet.residency.tiers.manager import TieredResidency
from moet.residency.tiers.options import TierOptions, TierSizes

__all__ = [
    "Copy",
    "Counts",
    "Entry",
    "Place",
    "Request",
    "Tier",
    "TierDevice",
    "TierOptions",
    "TierSizes",
    "TieredResidency",
]
