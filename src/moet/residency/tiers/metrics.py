"""What the tiers count: everything a user sizes them by."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field

from moet.formats.layout import Precision
from moet.residency.metrics import LATENCY_BOUNDS, LatencyHistogram, Phase
from moet.residency.reader import ReadResult
from moet.residency.tiers.device import Tier


@dataclass(frozen=True)
class TierUse:
    """One tier of one precision now. used: places that hold a row, are being filled, or are not
    free yet because a step may still read them."""

    places: int
    used: int
    row_bytes: int

    @property
    def free(self) -> int:
        return self.places - self.used


@dataclass(frozen=True)
class TierMetrics:
    """A snapshot. All but `tiers` only ever grow.

    steps: decode steps; steps_local: of these, those that read every row from GPU memory.
    hits, hit_bytes: rows that steps used, by the tier they were found in, and their bytes.
    disk_reads, disk_bytes, disk_latency, read_errors: of the pack. stall_seconds: time in which the
    device waited for an answer, as seen from the host. requests: answered; failed_requests: of
    these. promotions, demotions: rows moved to and from GPU memory; evictions: rows that are on
    disk only again. prefetched_rows: whose reads began before the layer that was to use them asked.
    tiers: by precision and tier, not DISK.
    """

    steps: int
    steps_local: int
    hits: Mapping[tuple[Precision, Phase, Tier], int]
    hit_bytes: Mapping[tuple[Precision, Phase, Tier], int]
    disk_reads: int
    disk_bytes: int
    disk_latency: LatencyHistogram
    read_errors: int
    stall_seconds: float
    requests: int
    failed_requests: int
    promotions: int
    demotions: int
    evictions: int
    prefetched_rows: int
    tiers: Mapping[tuple[Precision, Tier], TierUse]


@dataclass
class TierCounters:
    """The running counts that no one else keeps; written by the owner thread only."""

    disk_reads: int = 0
    disk_bytes: int = 0
    latency_counts: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_BOUNDS) + 1))
    latency_seconds: float = 0.0
    stall_seconds: float = 0.0
    requests: int = 0
    failed_requests: int = 0

    def add_read(self, read: ReadResult) -> None:
        self.disk_reads += 1
        self.disk_bytes += read.nbytes
        self.latency_counts[bisect_left(LATENCY_BOUNDS, read.seconds)] += 1
        self.latency_seconds += read.seconds
