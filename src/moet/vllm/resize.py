"""`POST /v1/moet/resize`: other sizes of the tiers while the server runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, HTTPException, Request
from pydantic import BaseModel, ConfigDict

from moet.errors import ConfigError, MoetError
from moet.formats.layout import Precision
from moet.host_memory import host_memory
from moet.residency.sizing import size_pool
from moet.residency.tiers.options import TierOptions, TierSizes, check_sizes
from moet.settings import Settings
from moet.vllm.guard import require_guard
from moet.vllm.pools import pool_setting
from moet.vllm.tiers import Rows, arena_places, owned_rows


class SizeChange(BaseModel):
    """What is given is changed; forms as of the settings of these names, without "auto"."""

    model_config = ConfigDict(extra="forbid", coerce_numbers_to_str=True)

    base_pool: str | None = None
    fp4_pool: str | None = None
    arena: str | None = None


def attach_resize(router: APIRouter, path: str) -> None:
    """Adds POST of `path`, which answers every rank's sizes in rows, by precision.

    Of the application's state it uses `moet_engine` and `moet_guarded`.
    """

    @router.post(path)
    async def resize(change: SizeChange, request: Request) -> dict[str, Any]:
        """Answers when places that are given up have been given back."""
        state = request.app.state
        require_guard(state, "sizes")
        values = change.model_dump(exclude_none=True)
        ranks = await state.moet_engine.collective_rpc("moet_resize", args=(values,))
        for number, answer in enumerate(ranks):
            if "error" in answer:
                raise HTTPException(400, f"rank {number}: {answer['error']}")
        return {"ranks": ranks}


def resize_rank(runtime: Any, values: Mapping[str, str], layer_rows: int) -> dict[str, Any]:
    """Changes a rank's sizes; returns them in rows, by precision, or an "error".

    Args:
        runtime: the rank's (`RankExperts`). values: of `SizeChange`. layer_rows: the most rows of a
            layer that a step can use.

    Tiers that become smaller go first, so that what they give back is there for the others.
    """
    tiers = runtime.stats()["tiers"]
    now: dict[str, dict[str, int]] = {}
    for tier in tiers:
        now.setdefault(tier["precision"], {})[tier["tier"]] = tier["places"]
    row_bytes = {tier["precision"]: tier["row_bytes"] for tier in tiers}
    try:
        if any(set(of) != {"gpu", "arena"} for of in now.values()):
            raise ConfigError("the pools of a CPU keep the size that they were started with.")
        owned = owned_rows(runtime.precision, runtime.recovery)
        rows = Rows(owned, {p: row_bytes[p] for p in owned})
        sizes = {p: TierSizes(now[p]["gpu"], now[p]["arena"]) for p in owned}
        wanted = changed_sizes(values, rows, sizes, TierOptions(layer_rows=layer_rows))
        by_growth = sorted(wanted, key=lambda p: (wanted[p].slots - sizes[p].slots) * row_bytes[p])
        for precision in by_growth:
            if wanted[precision] != sizes[precision]:
                runtime.resize(precision, wanted[precision])
    except MoetError as error:
        return {"error": str(error)}
    return {str(p): {"slots": of.slots, "places": of.places} for p, of in wanted.items()}


def changed_sizes(
    values: Mapping[str, str],
    rows: Rows,
    now: Mapping[Precision, TierSizes],
    options: TierOptions,
) -> dict[Precision, TierSizes]:
    """The sizes that `values` (of `SizeChange`) ask for; what they do not name stays.

    Raises ConfigError naming the setting.
    """
    settings = Settings.parse(values)
    for name, value in values.items():
        if value == "auto":
            raise ConfigError(f'{name} "auto" is for the start of a server.', "Give a size.")
    slots = {}
    for p, count in rows.count.items():
        name, setting = pool_setting(settings, p)
        slots[p] = now[p].slots
        if name in values:
            slots[p] = size_pool(setting, name=name, rows=count, row_bytes=rows.row_bytes[p]).slots
    places = {p: now[p].places for p in rows.count}
    if "arena" in values:
        available = host_memory().available + rows.nbytes(places)
        places = arena_places(settings.arena, rows, slots, options, available, available)
    sizes = {p: TierSizes(slots[p], places[p]) for p in rows.count}
    for p, size in sizes.items():
        check_sizes(p, rows.owned[p], size, rows.row_bytes[p], options)
    return sizes
