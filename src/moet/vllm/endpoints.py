"""Entry point `vllm.endpoint_plugins: moet_http`: statistics over HTTP and in /metrics.

vLLM loads endpoint plugins only when VLLM_PLUGINS names them (and then every other plugin must be
named as well). The numbers come from the workers through `MoetWorkerExtension`.
"""

from __future__ import annotations

import asyncio
from argparse import Namespace
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, generate_latest
from starlette.datastructures import State
from vllm.logger import init_logger
from vllm.v1.metrics.prometheus import get_prometheus_registry

from moet.vllm.gate.http import attach_gate
from moet.vllm.guard import guarded
from moet.vllm.machine import machine
from moet.vllm.metrics import RanksCollector
from moet.vllm.resize import attach_resize

logger = init_logger(f"vllm.{__name__}")  # vLLM shows its own loggers only

# vLLM's API key guards the paths below /v1, so these are below it.
STATS_PATH = "/v1/moet/stats"
ABOUT_PATH = "/v1/moet/about"
GATE_PATH = "/v1/moet/gate"
RESIZE_PATH = "/v1/moet/resize"
_POLL_SECONDS = 2.0


class MoetEndpoints:
    """What vLLM's API server asks of an endpoint plugin (`EndpointPlugin`)."""

    name = "moet_http"
    required_tasks: tuple[str, ...] | None = ("generate",)

    def __init__(self) -> None:
        self._collector = RanksCollector()

    def attach_router(self, app: FastAPI) -> None:
        router = APIRouter()

        @router.get(STATS_PATH)
        async def stats(request: Request) -> dict[str, Any]:
            """Residency statistics of every rank."""
            ranks = await request.app.state.moet_engine.collective_rpc("moet_stats")
            return {"ranks": ranks}

        @router.get(ABOUT_PATH)
        async def about(request: Request) -> dict[str, Any]:
            """Which rows are served, with which settings, and on which machine."""
            found = await request.app.state.moet_engine.collective_rpc("moet_about")
            first: dict[str, Any] = found[0]
            # Not asked of the workers, which vLLM may bind to some of the cores.
            on = await asyncio.to_thread(machine, first["tensor_parallel_size"])
            return first | {"machine": on}

        attach_gate(router, GATE_PATH)
        attach_resize(router, RESIZE_PATH)
        app.include_router(router)
        if get_prometheus_registry() is not REGISTRY:
            # Several API servers: vLLM's /metrics sums up what each has written to files, and a
            # collector has no place there. Each server knows every rank, so it adds them itself.
            app.add_api_route("/metrics", self._metrics, include_in_schema=False)

    async def init_state(self, engine_client: Any, state: State, args: Namespace) -> None:
        state.moet_engine = engine_client
        state.moet_guarded = guarded(args)
        if get_prometheus_registry() is REGISTRY:
            REGISTRY.register(self._collector)
        # The task is kept: the event loop holds only weak references to tasks.
        state.moet_poll = asyncio.create_task(_poll(engine_client, self._collector))

    def _metrics(self) -> Response:
        """vLLM's metrics and then ours. Not async: it reads files."""
        ours = CollectorRegistry()
        ours.register(self._collector)
        text = generate_latest(get_prometheus_registry()) + generate_latest(ours)
        return Response(text, media_type=CONTENT_TYPE_LATEST)


async def _poll(engine_client: Any, collector: RanksCollector) -> None:
    """Keeps the collector up to date until the engine is gone.

    Statistics are not worth a server: what goes wrong here is said once. If it goes wrong at once,
    the workers have no statistics; later, the next answer may be right again.
    """
    said = False
    while not engine_client.errored:
        try:
            collector.ranks = await engine_client.collective_rpc("moet_stats")
        except Exception as error:
            if not said:
                logger.warning("moet: no statistics in /metrics: %s", error)
            said = True
            if not collector.ranks:
                return
        await asyncio.sleep(_POLL_SECONDS)


def create() -> MoetEndpoints:
    """vLLM's factory."""
    return MoetEndpoints()
