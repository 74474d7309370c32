"""Entry point `vllm.endpoint_plugins: moet_http`: statistics over HTTP and in /metrics.

vLLM loads endpoint plugins only when VLLM_PLUGINS names them (and then every other plugin must be
named as well). The numbers come from the workers through `MoetWorkerExtension`.
"""

from __future__ import annotations

import asyncio
from argparse import Namespace
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from prometheus_client import REGISTRY
from starlette.datastructures import State
from vllm.logger import init_logger
from vllm.v1.metrics.prometheus import get_prometheus_registry

from moet.vllm.stats import RanksCollector

logger = init_logger(f"vllm.{__name__}")  # vLLM shows its own loggers only

# vLLM's API key guards the paths below /v1, so this one is below it.
STATS_PATH = "/v1/moet/stats"
_POLL_SECONDS = 2.0


class MoetEndpoints:
    """What vLLM's API server asks of an endpoint plugin (`EndpointPlugin`)."""

    name = "moet_http"
    required_tasks: tuple[str, ...] | None = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        router = APIRouter()

        @router.get(STATS_PATH)
        async def stats(request: Request) -> dict[str, Any]:
            """Residency statistics of every rank."""
            ranks = await request.app.state.moet_engine.collective_rpc("moet_stats")
            return {"ranks": ranks}

        app.include_router(router)

    async def init_state(self, engine_client: Any, state: State, args: Namespace) -> None:
        state.moet_engine = engine_client
        collector = RanksCollector()
        if get_prometheus_registry() is not REGISTRY:
            logger.warning(
                "moet: with several API servers, /metrics has none of moet's; %s has them.",
                STATS_PATH,
            )
            return
        REGISTRY.register(collector)
        # The task is kept: the event loop holds only weak references to tasks.
        state.moet_poll = asyncio.create_task(_poll(engine_client, collector))


async def _poll(engine_client: Any, collector: RanksCollector) -> None:
    """Keeps the collector up to date until the engine is gone."""
    while not engine_client.errored:
        try:
            collector.ranks = await engine_client.collective_rpc("moet_stats")
        except Exception as error:
            # Statistics are not worth a server: it serves on without them.
            logger.warning("moet: no statistics in /metrics: %s", error)
            return
        await asyncio.sleep(_POLL_SECONDS)


def create() -> MoetEndpoints:
    """vLLM's factory."""
    return MoetEndpoints()
