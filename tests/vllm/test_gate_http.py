"""The gate over HTTP: changed by those who may, within its ranges, and prompts computed anew."""

from argparse import Namespace
from types import SimpleNamespace

import pytest
from fastapi import APIRouter, FastAPI
from fastapi.testclient import TestClient

from moet.errors import ConfigError, UnsupportedError
from moet.settings import Settings
from moet.vllm.gate.checks import unsupported
from moet.vllm.gate.http import attach_gate
from moet.vllm.guard import guarded


class Engine:
    """The methods of vLLM's engine client that the endpoint uses."""

    def __init__(self, gate=True):
        self.gate = {"tau": 0.0, "cap": 1.0} if gate else None
        self.resets = 0

    async def collective_rpc(self, method, args):
        assert method == "moet_gate"
        if self.gate is not None:
            self.gate |= {k: v for k, v in zip(("tau", "cap"), args, strict=True) if v is not None}
        return [self.gate and dict(self.gate)] * 2

    async def reset_prefix_cache(self):
        self.resets += 1
        return True


def client(engine, may=True):
    app, router = FastAPI(), APIRouter()
    attach_gate(router, "/gate")
    app.include_router(router)
    app.state.moet_engine, app.state.moet_guarded = engine, may
    return TestClient(app)


def test_changes_and_answers_what_is_in_force():
    engine = Engine()
    c = client(engine)
    assert c.get("/gate").json() == {"tau": 0, "cap": 1}
    assert c.post("/gate", json={"tau": 0.6}).json() == {"tau": 0.6, "cap": 1}
    assert c.post("/gate", json={"cap": 0.2}).json() == {"tau": 0.6, "cap": 0.2}
    assert engine.resets == 0
    c.post("/gate", json={"tau": 1, "cap": 1})
    assert engine.resets == 1  # prompts run at FP4 now
    for body in ({"tau": -1}, {"cap": 2}, {"tua": 0.5}, {"tau": "x"}):
        assert c.post("/gate", json=body).status_code == 422
    assert c.get("/gate").json() == {"tau": 1, "cap": 1}


def test_refusals():
    assert client(Engine(gate=False)).post("/gate", json={"tau": 0.5}).status_code == 409
    open_to_all = client(Engine(), may=False)
    assert open_to_all.post("/gate", json={"tau": 0.5}).status_code == 403
    assert open_to_all.get("/gate").json() == {"tau": 0, "cap": 1}


@pytest.mark.parametrize(
    ("arguments", "may"),
    [
        ({"host": None}, False),
        ({"host": "0.0.0.0"}, False),
        ({"host": "example.org"}, False),
        ({"host": "0.0.0.0", "api_key": ["secret"]}, True),
        ({"host": "127.0.0.1"}, True),
        ({"host": "::1"}, True),
        ({"host": "localhost"}, True),
        ({"host": None, "uds": "/run/socket"}, True),
    ],
)
def test_who_may(arguments, may, monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    assert guarded(Namespace(**{"api_key": None, **arguments})) == may


def config(**changes):
    parallel = {
        "worker_cls": "moet.vllm.cpu_worker.MoetCPUWorker",
        "pipeline_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "use_ubatching": False,
    }
    model = dict.fromkeys(
        ("is_hybrid", "is_attention_free", "is_encoder_decoder", "is_mm_prefix_lm"), False
    )
    found = {"speculative_config": None, "kv_transfer_config": None}
    for values in (parallel, model, found):
        values |= {k: v for k, v in changes.items() if k in values}
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel),
        model_config=SimpleNamespace(**model),
        cache_config=SimpleNamespace(kv_sharing_fast_prefill=False),
        **found,
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"worker_cls": "vllm.v1.worker.cpu_worker.CPUWorker"}, "moet's worker"),
        ({"pipeline_parallel_size": 2}, "pipeline parallelism"),
        ({"speculative_config": object()}, "speculative decoding"),
        ({"is_hybrid": True}, "linear attention"),
        ({"is_encoder_decoder": True}, "not causal"),
        ({"decode_context_parallel_size": 2}, "context parallelism"),
        ({"use_ubatching": True}, "batch overlap"),
        ({"kv_transfer_config": object()}, "KV connector"),
    ],
)
def test_what_the_gate_cannot_be_combined_with(changes, message):
    gated = Settings.parse({"gate": {"tau": 0.5}})
    assert not list(unsupported(config(), gated))
    (problem,) = unsupported(config(**changes), gated)
    assert isinstance(problem, UnsupportedError)
    assert message in problem.message
    assert problem.hint
    assert not list(unsupported(config(**changes), Settings.parse({})))


@pytest.mark.parametrize(
    ("values", "changes", "message"),
    [
        ({"fp4_pool": "20%", "gate": {}}, {}, "decides by itself"),
        ({"fp4_pool": "20%", "precision": "fp4"}, {}, "decides by itself"),
        ({}, {}, "needs a size"),
        ({"fp4_pool": "20%"}, {"speculative_config": object()}, "draft layers"),
    ],
)
def test_what_the_hot_set_cannot_be_combined_with(values, changes, message):
    settings = Settings.parse({"adaptive": {}, **values})
    assert message in next(unsupported(config(**changes), settings)).message
    assert not list(unsupported(config(), Settings.parse({"adaptive": {}, "fp4_pool": "20%"})))


def test_settings():
    (problem,) = unsupported(config(), Settings.parse({"gate": {}, "precision": "fp4"}))
    assert isinstance(problem, ConfigError)
    for values in ({"tau": -0.1}, {"cap": 1.5}, {"tua": 0.5}, {"tau": "inf"}):
        with pytest.raises(ConfigError, match="gate"):
            Settings.parse({"gate": values})
    assert not Settings.parse({}).recovers
    assert Settings.parse({"prefill_precision": "fp4"}).recovers
