"""`moet_*` in /metrics: every rank's statistics as Prometheus families.

The API server's process has them from the workers (`endpoints.py` asks every few seconds), so a
scrape waits for nobody. Values are the workers' own counts since they started, never sums over
API servers; a restarted engine begins at 0, as Prometheus expects of a counter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

Stats = Mapping[str, Any]
"""What `stats.rank_stats` or `stats.tier_stats` gave."""

# A rank reports those that its platform has.
_COUNTERS = {
    "steps": "Steps finished: on a GPU those that decode, on the CPU all forward steps.",
    "steps_without_remote_row": "Of these, steps that found every expert's row in GPU memory (in "
    "RAM where there is no GPU).",
    "disk_bytes": "Bytes of expert rows read from disk, those to start with included.",
    "stall_seconds": "Seconds that steps waited for rows on disk.",
    "promotions": "Rows that moved to GPU memory; on the CPU, that decoding began to keep.",
    "demotions": "Rows that left GPU memory for host memory.",
    "evictions": "Rows that are on disk only again.",
    "prefetched_rows": "Rows whose reading began before the layer that uses them asked for them.",
    "read_errors": "Rows that could not be read or failed their checksum.",
    "requests": "Times that a step asked for rows on disk.",
    "failed_requests": "Of these, times that a row could not be had: the step has failed.",
}
# "Requests" alone would be taken for those of users.
_NAMES = {"requests": "disk_requests", "failed_requests": "failed_disk_requests"}
_ROWS = {
    "rows": "Rows of experts that steps used, by the tier in which they were found.",
    "bytes": "Bytes of expert rows that steps used, by the tier in which they were found.",
}
_TIERS: Mapping[str, tuple[str, Callable[[Stats], int]]] = {
    "places": ("Rows that a tier has room for.", lambda t: t["places"]),
    "places_used": ("Places of a tier that are not free.", lambda t: t["used"]),
    "bytes": ("Memory of a tier in bytes.", lambda t: t["places"] * t["row_bytes"]),
    "bytes_used": ("Memory of a tier that is not free.", lambda t: t["used"] * t["row_bytes"]),
}


class RanksCollector(Collector):
    """ranks: the newest statistics of every rank; set by whoever polls the workers."""

    def __init__(self) -> None:
        self.ranks: Sequence[Stats] = ()

    def collect(self) -> Iterable[Metric]:
        ranks = [(str(number), stats) for number, stats in enumerate(self.ranks)]
        for name, about in _COUNTERS.items():
            counter = CounterMetricFamily(f"moet_{_NAMES.get(name, name)}", about, labels=["rank"])
            for rank, stats in ranks:
                if name in stats:
                    counter.add_metric([rank], stats[name])
            yield counter
        for name, about in _ROWS.items():
            labels = ["rank", "precision", "phase", "tier"]
            counter = CounterMetricFamily(f"moet_expert_{name}", about, labels=labels)
            for rank, stats in ranks:
                for of in stats["rows"]:
                    counter.add_metric([rank, *(of[label] for label in labels[1:])], of[name])
            yield counter
        for name, (about, value) in _TIERS.items():
            labels = ["rank", "precision", "tier"]
            gauge = GaugeMetricFamily(f"moet_tier_{name}", about, labels=labels)
            for rank, stats in ranks:
                for tier in stats["tiers"]:
                    gauge.add_metric([rank, tier["precision"], tier["tier"]], value(tier))
            yield gauge
        yield _latency(ranks)
        yield from _further(ranks)


def _latency(ranks: Iterable[tuple[str, Stats]]) -> Metric:
    family = HistogramMetricFamily(
        "moet_disk_read_seconds", "Seconds that reading a row from disk took.", labels=["rank"]
    )
    for rank, stats in ranks:
        latency, seen, buckets = stats["disk_latency"], 0, []
        bounds = [*map(floatToGoString, latency["bounds_seconds"]), "+Inf"]
        for bound, count in zip(bounds, latency["counts"], strict=True):
            seen += count
            buckets.append((bound, seen))
        family.add_metric([rank], buckets, latency["total_seconds"])
    return family


def _further(ranks: Iterable[tuple[str, Stats]]) -> Iterable[Metric]:
    """What the runtime reports besides (`stats.Figure`)."""
    families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
    for rank, stats in ranks:
        for figure in stats.get("further", ()):
            name = f"moet_{figure['name']}"
            if name not in families:
                kind = CounterMetricFamily if figure["kind"] == "counter" else GaugeMetricFamily
                families[name] = kind(name, figure["about"], labels=["rank"])
            families[name].add_metric([rank], figure["value"])
    return families.values()
