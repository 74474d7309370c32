"""`POST /v1/moet/gate`: threshold and cap of the gate, while the server runs."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, HTTPException, Request
from pydantic import BaseModel, ConfigDict, Field
from vllm.logger import init_logger

from moet.vllm.guard import require_guard

logger = init_logger(f"vllm.{__name__}")  # vLLM shows its own loggers only


class GateChange(BaseModel):
    """What is given is changed; ranges as in `settings.GateSettings`."""

    model_config = ConfigDict(extra="forbid")

    tau: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    cap: float | None = Field(default=None, ge=0, le=1)


def attach_gate(router: APIRouter, path: str) -> None:
    """Adds GET and POST of `path`; both answer the settings in force.

    Of the application's state they use `moet_engine` and `moet_guarded`.
    """

    @router.get(path)
    async def show(request: Request) -> dict[str, float]:
        return await _set(request.app.state.moet_engine, GateChange())

    @router.post(path)
    async def change(change: GateChange, request: Request) -> dict[str, float]:
        """For steps from now on. Prompts that are cached are computed again if what they ran at
        has changed."""
        state = request.app.state
        require_guard(state, "the gate")
        before = await _set(state.moet_engine, GateChange())
        now = await _set(state.moet_engine, change)
        if _all_fire(before) != _all_fire(now) and not await state.moet_engine.reset_prefix_cache():
            logger.warning(
                "moet: requests are running, so the prefix cache keeps prompts that were computed "
                "with the gate's old threshold."
            )
        return now


async def _set(engine: Any, change: GateChange) -> dict[str, float]:
    ranks = await engine.collective_rpc("moet_gate", args=(change.tau, change.cap))
    if ranks[0] is None:
        raise HTTPException(
            409, "this server has no gate: start it with --set gate='{\"tau\": 0}', which is off."
        )
    found: dict[str, float] = ranks[0]
    return found


def _all_fire(settings: dict[str, float]) -> bool:
    """Whether prompts run at FP4, too (`Gate.everything`)."""
    return settings["tau"] >= 1 and settings["cap"] >= 1
