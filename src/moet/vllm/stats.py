"""Residency's metrics as plain values, as one line of text, and as Prometheus families."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from moet.residency.metrics import LATENCY_BOUNDS, Metrics
from moet.units import byte_size

_COUNTERS = {
    "steps": "Forward steps finished.",
    "steps_without_miss": "Forward steps whose experts were all in memory.",
    "memory_bytes": "Bytes of expert rows that were read where they lay in memory.",
    "disk_bytes": "Bytes of expert rows read from disk.",
    "stall_seconds": "Seconds that steps waited for disk.",
    "evictions": "Rows that lost their place in memory.",
    "promotions": "Rows that decoding began to keep in memory.",
    "read_errors": "Rows that could not be read or failed their checksum.",
}
_POOL_GAUGES = {
    "slots": "Slots of a pool.",
    "free": "Slots of a pool that are empty.",
    "kept": "Rows of a pool that decoding keeps.",
}


def rank_stats(metrics: Metrics) -> dict[str, Any]:
    """One rank's metrics as JSON-compatible values; names and units as in `Metrics`.

    A latency beyond the last bound is None.
    """
    return {
        **{name: getattr(metrics, name) for name in _COUNTERS},
        "hit_rate": metrics.hit_rate,
        "requests": [
            {
                "precision": str(precision),
                "phase": str(phase),
                "hits": metrics.hits.get((precision, phase), 0),
                "misses": metrics.misses.get((precision, phase), 0),
            }
            for precision, phase in sorted({*metrics.hits, *metrics.misses})
        ],
        "disk_latency": {
            "p50_seconds": _finite(metrics.disk_latency.p50),
            "p99_seconds": _finite(metrics.disk_latency.p99),
            "total_seconds": metrics.disk_latency.total_seconds,
            "bounds_seconds": list(LATENCY_BOUNDS),
            "counts": list(metrics.disk_latency.counts),
        },
        "pools": {
            str(precision): {
                "slots": pool.slots,
                "used": pool.used,
                "free": pool.free,
                "kept": pool.kept,
                "streaming": pool.streaming,
                "row_bytes": pool.row_bytes,
            }
            for precision, pool in metrics.pools.items()
        },
    }


def _finite(seconds: float) -> float | None:
    return seconds if math.isfinite(seconds) else None


def describe(metrics: Metrics) -> str:
    """One line for the log."""
    misses = sum(metrics.misses.values())
    return (
        f"{metrics.steps} steps ({metrics.steps_without_miss} without a miss), "
        f"{metrics.hit_rate:.1%} of experts found in memory, {misses} read from disk "
        f"({byte_size(metrics.disk_bytes)}, p99 {metrics.disk_latency.p99 * 1e3:.1f} ms), "
        f"{metrics.stall_seconds:.1f} s waited for disk"
    )


class RanksCollector(Collector):
    """The newest statistics of every rank as `moet_*` metric families.

    ranks: what `rank_stats` gave, by rank; set by whoever polls the workers.
    """

    def __init__(self) -> None:
        self.ranks: Sequence[Mapping[str, Any]] = ()

    def collect(self) -> Iterable[Metric]:
        for name, about in _COUNTERS.items():
            counter = CounterMetricFamily(f"moet_{name}", about, labels=["rank"])
            for rank, stats in enumerate(self.ranks):
                counter.add_metric([str(rank)], stats[name])
            yield counter
        for outcome in ("hits", "misses"):
            about = f"Experts asked for that were{'' if outcome == 'hits' else ' not'} in memory."
            labels = ["rank", "precision", "phase"]
            counter = CounterMetricFamily(f"moet_expert_{outcome}", about, labels=labels)
            for rank, stats in enumerate(self.ranks):
                for of in stats["requests"]:
                    counter.add_metric([str(rank), of["precision"], of["phase"]], of[outcome])
            yield counter
        for name, about in _POOL_GAUGES.items():
            gauge = GaugeMetricFamily(f"moet_pool_{name}", about, labels=["rank", "precision"])
            for rank, stats in enumerate(self.ranks):
                for precision, pool in stats["pools"].items():
                    gauge.add_metric([str(rank), precision], pool[name])
            yield gauge
        yield self._latency()

    def _latency(self) -> Metric:
        family = HistogramMetricFamily(
            "moet_disk_read_seconds", "Seconds that reading a row from disk took.", labels=["rank"]
        )
        for rank, stats in enumerate(self.ranks):
            latency, seen, buckets = stats["disk_latency"], 0, []
            bounds = [*map(str, latency["bounds_seconds"]), "+Inf"]
            for bound, count in zip(bounds, latency["counts"], strict=True):
                seen += count
                buckets.append((bound, seen))
            family.add_metric([str(rank)], buckets, latency["total_seconds"])
        return family
