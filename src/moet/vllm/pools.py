"""Pools of a CPU, made and filled: how many slots each precision gets, and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from vllm.distributed import get_world_group

from moet.errors import ConfigError
from moet.formats.layout import Precision, RowLayout
from moet.host_memory import HostMemory, host_memory
from moet.pack import RowSource
from moet.plan.reserve import Reserve, host_reserve, kv_room, serving_reserve, staging_bytes
from moet.residency.hot_set import HotSetOptions
from moet.residency.manager import ResidencyManager
from moet.residency.sizing import Sizing, size_pool
from moet.settings import Settings


def size_pools(
    settings: Settings,
    precision: Mapping[int, Sequence[Precision]],
    layouts: Mapping[Precision, RowLayout],
    vllm_config: Any,
) -> dict[Precision, Sizing]:
    """Sizes the pool of every precision in `precision` (layer → of each row).

    Pools set to "auto" share what is free in proportion to their rows' bytes.
    Raises ConfigError naming the setting.
    """
    rows = {p: sum(list(of).count(p) for of in precision.values()) for p in Precision}
    present = {p: count for p, count in rows.items() if count}
    sizes = {p: layouts[p].row_bytes for p in present}
    fixed: dict[Precision, Sizing] = {}
    automatic = []
    for p, count in present.items():
        name, setting = pool_setting(settings, p)
        if setting == "auto":
            automatic.append(p)
        else:
            fixed[p] = size_pool(setting, name=name, rows=count, row_bytes=sizes[p])
    if automatic:
        available, reserve = _memory(vllm_config)
        available -= sum(of.slots * sizes[p] for p, of in fixed.items())
        wanted = sum(present[p] * sizes[p] for p in automatic)
    for p in automatic:
        share = present[p] * sizes[p] / wanted
        fixed[p] = size_pool(
            "auto",
            name=pool_setting(settings, p)[0],
            rows=present[p],
            row_bytes=sizes[p],
            reserve=int(reserve * share),
            available=max(0, int(available * share)),
        )
    return {p: fixed[p] for p in present}


def make_manager(
    settings: Settings,
    source: RowSource,
    precision: Mapping[int, Sequence[Precision]],
    vllm_config: Any,
    *,
    recovery: Mapping[int, Precision] | None = None,
    heat_path: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[ResidencyManager, list[str]]:
    """Pools of the settings' sizes, filled, and the reasons for the sizes.

    Args:
        precision: of every expert, by layer. recovery: by layer, a precision that all its experts
            have rows of besides. heat_path, progress: as of `ResidencyManager`.

    Raises what `size_pools` and `ResidencyManager` raise.
    """
    rows = all_rows(precision, recovery or {})
    sizings = size_pools(settings, rows, source.layouts, vllm_config)
    hot = settings.adaptive
    manager = ResidencyManager(
        source,
        precision,
        {p: sizing.slots for p, sizing in sizings.items()},
        recovery=recovery or None,
        hot_set=None if hot is None else HotSetOptions(hot.every, hot.margin),
        streaming=settings.pool_streaming,
        policy=settings.pool_policy,
        io_threads=settings.io_threads,
        heat_path=heat_path,
        trace_path=rank_file("routing_trace", settings.routing_trace),
        progress=progress,
    )
    return manager, [sizing.reason for sizing in sizings.values()]


def all_rows(
    precision: Mapping[int, Sequence[Precision]], recovery: Mapping[int, Precision]
) -> dict[int, list[Precision]]:
    """The precision of every row of each layer: of its experts, and again where recovery has
    another one."""
    return {
        layer: [*of, *(recovery[layer] for own in of if recovery.get(layer, own) != own)]
        for layer, of in precision.items()
    }


def rank_file(name: str, path: Path | None) -> Path | None:
    """This rank's file for a setting: ranks of a pipeline have other layers, none may share one."""
    if path is None:
        return None
    if not path.parent.is_dir():
        raise ConfigError(
            f"{name} {path}: there is no directory {path.parent}.", "Make it, or name another."
        )
    rank = get_world_group().rank
    return path if rank == 0 else path.with_name(f"{path.name}.{rank}")


def pool_setting(settings: Settings, precision: Precision) -> tuple[str, str]:
    """Name and value of the setting for a precision's pool."""
    if precision is Precision.BASE:
        return "base_pool", settings.base_pool
    return "fp4_pool", settings.fp4_pool


def reserve_for(vllm_config: Any, *, gpu: bool) -> Reserve:
    """What this rank needs besides weights and experts, as vLLM is configured.

    Raises CheckpointError for a config without the keys that the KV cache follows from.
    """
    parallel, speculative = vllm_config.parallel_config, vllm_config.speculative_config
    dtype = str(vllm_config.cache_config.cache_dtype)
    return serving_reserve(
        vllm_config.model_config.hf_text_config.to_dict(),
        context=vllm_config.model_config.max_model_len,
        streams=vllm_config.scheduler_config.max_num_seqs,
        chunk=vllm_config.scheduler_config.max_num_batched_tokens,
        kv_dtype="fp8" if dtype.startswith("fp8") else "auto",
        tp=parallel.tensor_parallel_size,
        # As many draft layers as vLLM can run, of which most models have one.
        drafts=0 if speculative is None else 1,
        gpu=gpu,
        cautious=gpu,  # there, what is short ends the start of the server
    )


def kv_bytes(vllm_config: Any, reserve: Reserve, budget: int) -> tuple[int, str]:
    """Bytes to leave to the KV cache of this rank, and why. budget: bytes without it."""
    given: int | None = vllm_config.cache_config.kv_cache_memory_bytes
    if given:
        return given, "as --kv-cache-memory-bytes says"
    context = vllm_config.model_config.max_model_len
    streams = vllm_config.scheduler_config.max_num_seqs
    nbytes, requests = kv_room(reserve.kv_cache, context, streams, budget)
    stages = vllm_config.parallel_config.pipeline_parallel_size
    number = f"{requests} requests" if requests > 1 else "one request"
    return -(-nbytes // stages), f"room for {number} of {context:,} tokens"


def host_budget(vllm_config: Any, *, gpu: bool) -> tuple[HostMemory, int]:
    """The host's memory now, and bytes of it that this rank may use besides what it uses now.

    Every rank comes to the same share, whichever has its rows in memory already.
    """
    memory, used = host_memory(), psutil.Process().memory_info().rss
    ranks = vllm_config.parallel_config.local_world_size
    process = host_reserve(1, gpu) - host_reserve(0, gpu)
    share = (memory.total - host_reserve(ranks, gpu)) // ranks - max(0, used - process)
    return memory, max(0, min(share, memory.available - staging_bytes()))


def _memory(vllm_config: Any) -> tuple[int, int]:
    """Bytes of memory that are free, and of them those that this rank leaves to everything else."""
    memory, budget = host_budget(vllm_config, gpu=False)
    # vLLM's CPU worker bounds itself, pools included, by this share of the machine.
    own = int(memory.total * vllm_config.cache_config.gpu_memory_utilization)
    budget = min(budget, own - psutil.Process().memory_info().rss)
    reserve = reserve_for(vllm_config, gpu=False)
    budget -= sum(reserve.workspace.values())
    budget -= kv_bytes(vllm_config, reserve, budget)[0]
    return memory.available, memory.available - max(0, budget)
