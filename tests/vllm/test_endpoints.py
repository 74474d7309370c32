"""Statistics over HTTP: guarded by vLLM's API key, complete, and in Prometheus' own terms."""

import asyncio
from dataclasses import replace

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware
from vllm.plugins.endpoint_plugins.interface import EndpointPlugin

from moet.formats import Precision
from moet.residency.metrics import LATENCY_BOUNDS, LatencyHistogram, Metrics, Phase, PoolMetrics
from moet.vllm.endpoints import STATS_PATH, create
from moet.vllm.stats import RanksCollector, describe, rank_stats

METRICS = Metrics(
    steps=10,
    steps_without_miss=4,
    hits={(Precision.BASE, Phase.DECODE): 30},
    misses={(Precision.BASE, Phase.DECODE): 10, (Precision.NVFP4, Phase.SCAN): 2},
    memory_bytes=3000,
    disk_bytes=1200,
    stall_seconds=0.5,
    evictions=7,
    promotions=5,
    waves=20,
    read_errors=1,
    disk_latency=LatencyHistogram((*[0] * 6, 12, *[0] * (len(LATENCY_BOUNDS) - 6)), 0.25),
    pools={Precision.BASE: PoolMetrics(8, 6, 2, 4, 2, 4096)},
)


class Engine:
    """The two methods of vLLM's engine client that the endpoints use."""

    errored = False

    async def collective_rpc(self, method, *args, **kwargs):
        assert method == "moet_stats"
        return [rank_stats(METRICS), rank_stats(METRICS)]


@pytest.fixture
def app():
    app, plugin = FastAPI(), create()
    assert isinstance(plugin, EndpointPlugin)
    plugin.attach_router(app)
    app.state.moet_engine = Engine()
    return app


def test_stats_of_every_rank(app):
    ranks = TestClient(app).get(STATS_PATH).json()["ranks"]
    assert len(ranks) == 2
    assert ranks[0]["hit_rate"] == pytest.approx(30 / 42)
    assert ranks[1]["pools"]["base"]["slots"] == 8
    assert {"precision": "nvfp4", "phase": "scan", "hits": 0, "misses": 2} in ranks[0]["requests"]


def test_a_latency_beyond_all_bounds_is_valid_json(app):
    class Slow(Engine):
        async def collective_rpc(self, method, *args, **kwargs):
            counts = (*[0] * len(LATENCY_BOUNDS), 1)
            slow = replace(METRICS, disk_latency=LatencyHistogram(counts, 60.0))
            assert "inf ms" in describe(slow)
            return [rank_stats(slow)]

    app.state.moet_engine = Slow()
    (rank,) = TestClient(app).get(STATS_PATH).json()["ranks"]
    assert rank["disk_latency"]["p99_seconds"] is None


def test_the_api_key_guards_them(app):
    app.add_middleware(AuthenticationMiddleware, tokens=["secret"])
    client = TestClient(app)
    assert client.get(STATS_PATH).status_code == 401
    assert client.get(STATS_PATH, headers={"Authorization": "Bearer other"}).status_code == 401
    assert client.get(STATS_PATH, headers={"Authorization": "Bearer secret"}).status_code == 200


def families(*ranks):
    collector, registry = RanksCollector(), CollectorRegistry()
    collector.ranks = ranks
    registry.register(collector)
    text = generate_latest(registry).decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def test_prometheus_families():
    found = families(rank_stats(METRICS), rank_stats(METRICS))
    assert all(name.startswith("moet_") and family.documentation for name, family in found.items())
    assert found["moet_disk_bytes"].type == "counter"
    values = {(s.name, s.labels["rank"]): s.value for s in found["moet_disk_bytes"].samples}
    assert values["moet_disk_bytes_total", "1"] == 1200
    (misses,) = (
        s.value
        for s in found["moet_expert_misses"].samples
        if s.labels == {"rank": "0", "precision": "base", "phase": "decode"}
    )
    assert misses == 10
    assert found["moet_pool_free"].type == "gauge"
    buckets = [s for s in found["moet_disk_read_seconds"].samples if s.name.endswith("_bucket")]
    assert found["moet_disk_read_seconds"].type == "histogram"
    assert buckets[5].value == 0
    assert buckets[6].value == 12
    assert buckets[6].labels["le"] == str(LATENCY_BOUNDS[6])


def test_before_the_first_poll_there_are_no_samples():
    assert not any(family.samples for family in families().values())


def test_polling_stops_quietly_when_the_worker_has_no_such_method(monkeypatch):
    from moet.vllm import endpoints

    class Plain(Engine):
        async def collective_rpc(self, method, *args, **kwargs):
            raise RuntimeError("no method moet_stats")

    said = []
    monkeypatch.setattr(endpoints.logger, "warning", lambda *args: said.append(args))
    collector = RanksCollector()
    asyncio.run(endpoints._poll(Plain(), collector))
    assert "no method moet_stats" in str(said)
    assert collector.ranks == ()


def test_a_line_for_the_log():
    assert describe(METRICS) == (
        "10 steps (4 without a miss), 71.4% of experts found in memory, 12 read from disk "
        "(1.2 KiB, p99 1.0 ms), 0.5 s waited for disk"
    )
