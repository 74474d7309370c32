"""Statistics over HTTP: guarded by vLLM's API key, complete, and in /metrics."""

import asyncio
from dataclasses import replace

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families
from vllm.entrypoints.serve.instrumentator.metrics import attach_router
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware
from vllm.plugins.endpoint_plugins.interface import (
    EndpointPlugin,
    attach_endpoint_plugins,
    init_endpoint_plugins_state,
)

from moet.formats import Precision
from moet.residency.metrics import LATENCY_BOUNDS, LatencyHistogram, Metrics, Phase, PoolMetrics
from moet.vllm import endpoints
from moet.vllm.endpoints import STATS_PATH, create
from moet.vllm.metrics import RanksCollector
from moet.vllm.stats import describe, rank_stats

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
    prefetched_rows=3,
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
    assert {"tier": "disk", "precision": "base", "phase": "decode", "rows": 10} in [
        {key: value for key, value in rows.items() if key != "bytes"} for rows in ranks[0]["rows"]
    ]


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


def test_several_api_servers_have_them_too(monkeypatch, tmp_path):
    """As vLLM's own code sets one of them up: each shows every rank once."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    monkeypatch.setattr("vllm.plugins.load_endpoint_plugins", lambda tasks: [create()])
    app = FastAPI()
    attach_router(app)
    attach_endpoint_plugins(app, ("generate",))

    async def start():
        await init_endpoint_plugins_state(Engine(), app.state, None)
        await asyncio.sleep(0)
        app.state.moet_poll.cancel()

    asyncio.run(start())
    answer = TestClient(app).get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    families = list(text_string_to_metric_families(answer.text))
    steps = [family for family in families if family.name == "moet_steps"]
    assert [s.value for s in steps[0].samples] == [10, 10]
    assert len(steps) == 1


class Failing(Engine):
    """Answers only so often."""

    def __init__(self, *answers):
        self.answers = list(answers)

    @property
    def errored(self):
        return not self.answers

    async def collective_rpc(self, method, *args, **kwargs):
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def said(monkeypatch):
    said = []
    monkeypatch.setattr(endpoints.logger, "warning", lambda *args: said.append(args))
    monkeypatch.setattr(endpoints, "_POLL_SECONDS", 0)
    return said


def test_polling_stops_quietly_when_the_worker_has_no_such_method(said):
    engine, collector = Failing(RuntimeError("no method moet_stats"), [1]), RanksCollector()
    asyncio.run(endpoints._poll(engine, collector))
    assert "no method moet_stats" in str(said)
    assert collector.ranks == ()
    assert engine.answers == [[1]]


def test_polling_goes_on_after_an_answer_that_did_not_come(said):
    collector = RanksCollector()
    late = RuntimeError("late")
    asyncio.run(endpoints._poll(Failing([1], late, late, [2]), collector))
    assert collector.ranks == [2]
    assert len(said) == 1
