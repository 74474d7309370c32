"""Statistics in Prometheus' own terms, of CPU pools and of a GPU's tiers, and in words."""

from collections.abc import Mapping
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as openmetrics_families,
)
from prometheus_client.parser import text_string_to_metric_families

from moet.formats import Precision
from moet.residency.metrics import LATENCY_BOUNDS, LatencyHistogram, Metrics, Phase, PoolMetrics
from moet.residency.tiers import Tier
from moet.residency.tiers.metrics import TierMetrics, TierUse
from moet.vllm.metrics import RanksCollector
from moet.vllm.stats import Figure, describe, describe_tiers, rank_stats, tier_stats

BASE, FP4 = Precision.BASE, Precision.NVFP4
LATENCY = LatencyHistogram((*[0] * 6, 12, *[0] * (len(LATENCY_BOUNDS) - 7), 3), 0.25)

POOLS = Metrics(
    steps=10,
    steps_without_miss=4,
    hits={(BASE, Phase.DECODE): 30},
    misses={(BASE, Phase.DECODE): 10, (FP4, Phase.SCAN): 2},
    memory_bytes=30 * 4096,
    disk_bytes=1200,
    stall_seconds=0.5,
    evictions=7,
    promotions=5,
    prefetched_rows=3,
    waves=20,
    read_errors=1,
    disk_latency=LATENCY,
    pools={BASE: PoolMetrics(8, 6, 2, 4, 2, 4096), FP4: PoolMetrics(3, 3, 0, 1, 2, 8192)},
)

ROWS = {
    (BASE, Phase.DECODE, Tier.GPU): 900,
    (BASE, Phase.DECODE, Tier.ARENA): 90,
    (BASE, Phase.DECODE, Tier.DISK): 10,
    (BASE, Phase.SCAN, Tier.ARENA): 500,
    (FP4, Phase.DECODE, Tier.GPU): 0,
}
TIERS = TierMetrics(
    steps=100,
    steps_local=60,
    hits=ROWS,
    hit_bytes={key: count * 4096 for key, count in ROWS.items()},
    disk_reads=15,
    disk_bytes=61440,
    disk_latency=LATENCY,
    read_errors=1,
    stall_seconds=0.75,
    requests=9,
    failed_requests=0,
    promotions=20,
    demotions=18,
    evictions=11,
    prefetched_rows=4,
    tiers={
        (BASE, Tier.GPU): TierUse(64, 64, 4096),
        (BASE, Tier.ARENA): TierUse(32, 30, 4096),
    },
)

Samples = Mapping[str, Any]


def families(*ranks: Samples) -> dict[str, Any]:
    """What a scrape of each kind reads, by name."""
    collector, registry = RanksCollector(), CollectorRegistry()
    collector.ranks = ranks
    registry.register(collector)
    text = generate_latest(registry).decode()
    found = {family.name: family for family in text_string_to_metric_families(text)}
    strict = list(openmetrics_families(generate_openmetrics(registry).decode()))
    assert {family.name: family.type for family in strict} == {
        name: family.type for name, family in found.items()
    }
    return found


def value(family: Any, **labels: str) -> float:
    (found,) = (sample.value for sample in family.samples if sample.labels == labels)
    return found


def test_every_family_has_a_name_a_help_and_a_rank() -> None:
    found = families(rank_stats(POOLS), tier_stats(TIERS))
    assert all(name.startswith("moet_") and family.documentation for name, family in found.items())
    assert all("rank" in sample.labels for family in found.values() for sample in family.samples)


def test_counters_of_each_rank() -> None:
    found = families(rank_stats(POOLS), rank_stats(POOLS))
    assert found["moet_disk_bytes"].type == "counter"
    assert {sample.name for sample in found["moet_disk_bytes"].samples} == {"moet_disk_bytes_total"}
    assert value(found["moet_disk_bytes"], rank="1") == 1200
    assert value(found["moet_steps_without_remote_row"], rank="0") == 4
    assert not found["moet_demotions"].samples  # the CPU has none


def test_pools_are_tiers_of_memory_and_disk() -> None:
    found = families(rank_stats(POOLS))
    labels = {"rank": "0", "precision": "base", "phase": "decode"}
    assert value(found["moet_expert_rows"], tier="memory", **labels) == 30
    assert value(found["moet_expert_rows"], tier="disk", **labels) == 10
    assert value(found["moet_expert_bytes"], tier="memory", **labels) == POOLS.memory_bytes
    assert found["moet_tier_places"].type == "gauge"
    pool = {"rank": "0", "precision": "nvfp4", "tier": "memory"}
    assert value(found["moet_tier_places"], **pool) == 3
    assert value(found["moet_tier_bytes"], **pool) == 3 * 8192


def test_tiers_of_a_gpu() -> None:
    found = families(tier_stats(TIERS))
    for (precision, phase, tier), count in ROWS.items():
        labels = {"rank": "0", "precision": precision, "phase": phase, "tier": tier.name.lower()}
        assert value(found["moet_expert_rows"], **labels) == count
        assert value(found["moet_expert_bytes"], **labels) == count * 4096
    arena = {"rank": "0", "precision": "base", "tier": "arena"}
    assert value(found["moet_tier_places"], **arena) == 32
    assert value(found["moet_tier_places_used"], **arena) == 30
    assert value(found["moet_tier_bytes"], **arena) == 32 * 4096
    assert value(found["moet_tier_bytes_used"], **arena) == 30 * 4096
    counts = {
        "steps": 100,
        "steps_without_remote_row": 60,
        "stall_seconds": 0.75,
        "promotions": 20,
        "demotions": 18,
        "evictions": 11,
        "disk_requests": 9,
        "failed_disk_requests": 0,
        "read_errors": 1,
    }
    for name, count in counts.items():
        assert value(found[f"moet_{name}"], rank="0") == count


def test_latency_is_a_histogram_of_cumulative_buckets() -> None:
    family = families(tier_stats(TIERS))["moet_disk_read_seconds"]
    assert family.type == "histogram"
    buckets = [s for s in family.samples if s.name.endswith("_bucket")]
    assert [float(s.labels["le"]) for s in buckets] == [*LATENCY_BOUNDS, float("inf")]
    assert [s.value for s in buckets] == [0] * 6 + [12] * (len(LATENCY_BOUNDS) - 6) + [15]
    sums = {s.name.rpartition("_")[2]: s.value for s in family.samples[len(buckets) :]}
    assert sums == {"count": 15, "sum": 0.25}


def test_figures_of_a_runtime_are_passed_on() -> None:
    gate = [
        Figure("gate_fired", "Steps run again.", 3),
        Figure("gate_threshold", "The threshold.", 0.6, "gauge"),
    ]
    found = families(rank_stats(POOLS, gate), tier_stats(TIERS, gate))
    fired = found["moet_gate_fired"]
    assert (fired.type, fired.documentation) == ("counter", "Steps run again.")
    assert value(fired, rank="1") == 3
    assert value(found["moet_gate_threshold"], rank="0") == 0.6
    assert found["moet_gate_threshold"].type == "gauge"


def test_before_the_first_poll_there_are_no_samples() -> None:
    assert not any(family.samples for family in families().values())


def test_a_line_for_the_log() -> None:
    assert describe(POOLS) == (
        "10 steps (4 without a miss), 71.4% of experts found in memory, 12 read from disk "
        "(1.2 KiB, p99 inf ms), 0.5 s waited for disk"
    )
    line = describe_tiers(TIERS)
    assert line == (
        "100 decode steps (60 without a remote row), of their rows 90.0% found in GPU memory, "
        "9.0% in host memory, 1.0% on disk; 15 rows read from disk (60.0 KiB, p99 inf ms), 0.8 s "
        "waited for them; 20 promoted, 18 demoted, 11 evicted"
    )


def test_a_rank_that_has_not_decoded_yet() -> None:
    none = TierMetrics(**(vars(TIERS) | {"hits": dict.fromkeys(ROWS, 0)}))
    assert tier_stats(none)["hit_rate"] == 1
    assert "100.0% found in GPU memory" in describe_tiers(none)
    failed = TierMetrics(**(vars(TIERS) | {"failed_requests": 2}))
    assert describe_tiers(failed).endswith("; 2 requests failed, 1 read errors")
    assert tier_stats(failed)["hit_rate"] == pytest.approx(0.9)
