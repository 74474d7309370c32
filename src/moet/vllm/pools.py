"""How many slots each precision gets: the size settings, applied to what this rank computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import psutil
from vllm.platforms import current_platform

from moet.formats.layout import Precision, RowLayout
from moet.residency.sizing import Sizing, size_pool
from moet.settings import Settings

# What "auto" leaves to vLLM and the operating system besides the KV cache.
_RESERVE = 2 << 30
# The KV cache that "auto" leaves room for where vLLM would take whatever remains.
_KV_CACHE = 4 << 30


def size_pools(
    settings: Settings,
    precision: Mapping[int, Sequence[Precision]],
    layouts: Mapping[Precision, RowLayout],
    vllm_config: Any,
) -> dict[Precision, Sizing]:
    """Sizes the pool of every precision in `precision` (layer → of each expert).

    Pools set to "auto" share what is free in proportion to their rows' bytes.
    Raises ConfigError naming the setting.
    """
    rows = {p: sum(list(of).count(p) for of in precision.values()) for p in Precision}
    present = {p: count for p, count in rows.items() if count}
    sizes = {p: layouts[p].row_bytes for p in present}
    fixed: dict[Precision, Sizing] = {}
    automatic = []
    for p, count in present.items():
        name, setting = _setting(settings, p)
        if setting == "auto":
            automatic.append(p)
        else:
            fixed[p] = size_pool(setting, name=name, rows=count, row_bytes=sizes[p])
    available, reserve = _memory(vllm_config)
    available -= sum(of.slots * sizes[p] for p, of in fixed.items())
    wanted = sum(present[p] * sizes[p] for p in automatic)
    for p in automatic:
        share = present[p] * sizes[p] / wanted
        fixed[p] = size_pool(
            "auto",
            name=_setting(settings, p)[0],
            rows=present[p],
            row_bytes=sizes[p],
            reserve=int(reserve * share),
            available=max(0, int(available * share)),
        )
    return {p: fixed[p] for p in present}


def _setting(settings: Settings, precision: Precision) -> tuple[str, str]:
    if precision is Precision.BASE:
        return "base_pool", settings.base_pool
    return "fp4_pool", settings.fp4_pool


def _memory(vllm_config: Any) -> tuple[int, int]:
    """Bytes of memory that this rank may use, and of them those to leave to vLLM and the system."""
    memory = psutil.virtual_memory()
    cache = vllm_config.cache_config
    available = memory.available
    if current_platform.is_cpu():
        # vLLM's CPU worker bounds itself, pools included, by this share of the machine.
        budget = int(memory.total * cache.gpu_memory_utilization)
        available = min(available, budget - psutil.Process().memory_info().rss)
    ranks = vllm_config.parallel_config.local_world_size
    return available // ranks, (cache.kv_cache_memory_bytes or _KV_CACHE) + _RESERVE
