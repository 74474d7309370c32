"""What residency counts: everything a user sizes a pool by."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from moet.formats.layout import Precision
from moet.residency.reader import ReadResult

# Upper bounds of the disk latency buckets in seconds: 16 µs, doubling, to 16.8 s.
LATENCY_BOUNDS: tuple[float, ...] = tuple(2.0**k * 1e-6 for k in range(4, 25))


class Phase(StrEnum):
    """Who asks for an expert: a token being decoded, or prompt tokens only (a scan)."""

    DECODE = "decode"
    SCAN = "scan"


@dataclass(frozen=True)
class LatencyHistogram:
    """Latencies of disk reads. counts: reads in each bucket of `LATENCY_BOUNDS`, then the rest."""

    counts: tuple[int, ...]
    total_seconds: float

    def quantile(self, q: float) -> float:
        """Upper bound in seconds of the bucket with the q-quantile; 0 when there was no read."""
        wanted, seen = q * sum(self.counts), 0
        for bound, count in zip((*LATENCY_BOUNDS, float("inf")), self.counts, strict=True):
            seen += count
            if count and seen >= wanted:
                return bound
        return 0.0

    @property
    def p50(self) -> float:
        return self.quantile(0.5)

    @property
    def p99(self) -> float:
        return self.quantile(0.99)


@dataclass(frozen=True)
class PoolMetrics:
    """One pool now. slots = used + free; a used slot holds a row or is being filled.

    kept: rows that decode keeps. streaming: slots that it leaves to rows passing through.
    """

    slots: int
    used: int
    free: int
    kept: int
    streaming: int
    row_bytes: int


@dataclass(frozen=True)
class Metrics:
    """A snapshot. All but `pools` only ever grow.

    steps: finished steps (a step ends when the next begins, or at `close`); steps_without_miss: of
    these. hits, misses: experts asked for that were, or were not, in memory. memory_bytes: bytes
    of the rows that hit; disk_bytes: bytes read from the source, to start warm too. stall_seconds:
    time a lease waited for disk. evictions: rows that lost their place. promotions: rows that
    decode began to keep. prefetched_rows: whose reads began before a lease asked for them. waves:
    also the newest epoch. read_errors: rows that could not be read.
    """

    steps: int
    steps_without_miss: int
    hits: Mapping[tuple[Precision, Phase], int]
    misses: Mapping[tuple[Precision, Phase], int]
    memory_bytes: int
    disk_bytes: int
    stall_seconds: float
    evictions: int
    promotions: int
    prefetched_rows: int
    waves: int
    read_errors: int
    disk_latency: LatencyHistogram
    pools: Mapping[Precision, PoolMetrics]

    @property
    def hit_rate(self) -> float:
        """Share of the experts asked for that were in memory; 1 when none was asked for."""
        hits, misses = sum(self.hits.values()), sum(self.misses.values())
        return hits / (hits + misses) if hits + misses else 1.0


@dataclass
class Counters:
    """The running counts behind `Metrics`; written by the thread that holds the lease only."""

    steps: int = 0
    steps_without_miss: int = 0
    hits: dict[tuple[Precision, Phase], int] = field(default_factory=dict)
    misses: dict[tuple[Precision, Phase], int] = field(default_factory=dict)
    memory_bytes: int = 0
    disk_bytes: int = 0
    stall_seconds: float = 0.0
    waves: int = 0
    read_errors: int = 0
    latency_counts: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_BOUNDS) + 1))
    latency_seconds: float = 0.0

    def add_read(self, read: ReadResult) -> None:
        """Counts a row that was read from the source."""
        self.disk_bytes += read.nbytes
        self.latency_counts[bisect_left(LATENCY_BOUNDS, read.seconds)] += 1
        self.latency_seconds += read.seconds
