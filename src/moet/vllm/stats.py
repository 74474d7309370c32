"""Residency's metrics as plain values, and as one line of text.

The plain values are what a worker answers to `moet_stats`, what `GET /v1/moet/stats` gives, and
what `metrics.py` makes Prometheus families of.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from moet.residency.metrics import LATENCY_BOUNDS, LatencyHistogram, Metrics, Phase
from moet.residency.tiers.device import Tier
from moet.residency.tiers.metrics import TierMetrics
from moet.units import byte_size

# Plain numbers of each kind of metrics, as they are named there.
_POOLS = (
    "steps",
    "steps_without_miss",
    "memory_bytes",
    "disk_bytes",
    "stall_seconds",
    "evictions",
    "promotions",
    "prefetched_rows",
    "read_errors",
)
_TIERS = (
    "steps",
    "disk_bytes",
    "disk_reads",
    "stall_seconds",
    "evictions",
    "promotions",
    "demotions",
    "prefetched_rows",
    "read_errors",
    "requests",
    "failed_requests",
)


@dataclass(frozen=True)
class Figure:
    """One more number that a runtime reports, in Prometheus' terms.

    name: without `moet_` and without a counter's `_total`. about: the help text. kind: a counter
    only ever grows.
    """

    name: str
    about: str
    value: float
    kind: Literal["counter", "gauge"] = "counter"


def rank_stats(metrics: Metrics, further: Iterable[Figure] = ()) -> dict[str, Any]:
    """One rank's metrics as JSON-compatible values; names and units as in `Metrics`.

    A latency beyond the last bound is None.
    """
    row_bytes = {precision: pool.row_bytes for precision, pool in metrics.pools.items()}
    found = {"memory": metrics.hits, "disk": metrics.misses}
    return {
        **{name: getattr(metrics, name) for name in _POOLS},
        "steps_without_remote_row": metrics.steps_without_miss,
        "hit_rate": metrics.hit_rate,
        "rows": [
            _rows(precision, phase, tier, count, row_bytes.get(precision, 0))
            for tier, counts in found.items()
            for (precision, phase), count in sorted(counts.items())
        ],
        "disk_latency": _latency(metrics.disk_latency),
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
        "tiers": [
            _tier(precision, "memory", pool.slots, pool.used, pool.row_bytes)
            for precision, pool in metrics.pools.items()
        ],
        "further": [dataclasses.asdict(figure) for figure in further],
    }


def tier_stats(metrics: TierMetrics, further: Iterable[Figure] = ()) -> dict[str, Any]:
    """The same of a rank whose rows are in a GPU's tiers; names and units as in `TierMetrics`.

    hit_rate: of decode's rows, the share that was in GPU memory.
    """
    return {
        **{name: getattr(metrics, name) for name in _TIERS},
        "steps_without_remote_row": metrics.steps_local,
        "hit_rate": _shares(metrics)[Tier.GPU],
        "rows": [
            {**_rows(precision, phase, _name(tier), count, 0), "bytes": metrics.hit_bytes[key]}
            for key, count in metrics.hits.items()
            for precision, phase, tier in (key,)
        ],
        "disk_latency": _latency(metrics.disk_latency),
        "tiers": [
            _tier(precision, _name(tier), use.places, use.used, use.row_bytes)
            for (precision, tier), use in metrics.tiers.items()
        ],
        "further": [dataclasses.asdict(figure) for figure in further],
    }


def hot_set_figures(size: int, exchanges: int) -> list[Figure]:
    """Of an adaptive hot set."""
    return [
        Figure("hot_set_rows", "Experts of the adaptive hot set.", size, "gauge"),
        Figure("hot_set_exchanges", "Experts that another one replaced.", exchanges),
        Figure("history_dependent", "1: outputs depend on earlier requests.", 1, "gauge"),
    ]


def describe(metrics: Metrics) -> str:
    """One line for the log."""
    misses = sum(metrics.misses.values())
    return (
        f"{metrics.steps} steps ({metrics.steps_without_miss} without a miss), "
        f"{metrics.hit_rate:.1%} of experts found in memory, {misses} read from disk "
        f"({byte_size(metrics.disk_bytes)}, p99 {metrics.disk_latency.p99 * 1e3:.1f} ms), "
        f"{metrics.stall_seconds:.1f} s waited for disk"
    )


def describe_tiers(metrics: TierMetrics) -> str:
    """One line for the log."""
    shares = _shares(metrics)
    line = (
        f"{metrics.steps} decode steps ({metrics.steps_local} without a remote row), of their rows "
        f"{shares[Tier.GPU]:.1%} found in GPU memory, {shares[Tier.ARENA]:.1%} in host memory, "
        f"{shares[Tier.DISK]:.1%} on disk; {metrics.disk_reads} rows read from disk "
        f"({byte_size(metrics.disk_bytes)}, p99 {metrics.disk_latency.p99 * 1e3:.1f} ms), "
        f"{metrics.stall_seconds:.1f} s waited for them; {metrics.promotions} promoted, "
        f"{metrics.demotions} demoted, {metrics.evictions} evicted"
    )
    if metrics.failed_requests:
        line += f"; {metrics.failed_requests} requests failed, {metrics.read_errors} read errors"
    return line


def _shares(metrics: TierMetrics) -> dict[Tier, float]:
    """Of the rows that decode used, by where they were found; all in GPU memory if none was."""
    counts = {
        tier: sum(
            count
            for (_, phase, found), count in metrics.hits.items()
            if found == tier and phase == Phase.DECODE
        )
        for tier in Tier
    }
    total = sum(counts.values())
    if not total:
        return {tier: float(tier == Tier.GPU) for tier in Tier}
    return {tier: count / total for tier, count in counts.items()}


def _name(tier: Tier) -> str:
    return tier.name.lower()


def _rows(precision: str, phase: str, tier: str, count: int, row_bytes: int) -> dict[str, Any]:
    return {
        "precision": str(precision),
        "phase": str(phase),
        "tier": tier,
        "rows": count,
        "bytes": count * row_bytes,
    }


def _tier(precision: str, tier: str, places: int, used: int, row_bytes: int) -> dict[str, Any]:
    return {
        "precision": str(precision),
        "tier": tier,
        "places": places,
        "used": used,
        "row_bytes": row_bytes,
    }


def _latency(latency: LatencyHistogram) -> dict[str, Any]:
    return {
        "p50_seconds": _finite(latency.p50),
        "p99_seconds": _finite(latency.p99),
        "total_seconds": latency.total_seconds,
        "bounds_seconds": list(LATENCY_BOUNDS),
        "counts": list(latency.counts),
    }


def _finite(seconds: float) -> float | None:
    return seconds if math.isfinite(seconds) else None
