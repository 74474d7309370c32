"""What a rank that serves must leave to everything but experts, and how tiers share the rest.

The planner counts with these formulas before anything is downloaded, and a server whose pools are
set to `auto` when it has loaded everything else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moet.plan.inventory import text_config
from moet.plan.kv import KvCache, hidden_size, kv_cache
from moet.plan.machine import GIB
from moet.plan.measured import assumption

# What prefill's buffers, and the KV cache of a pool set to `auto`, take at most of what is left.
_BUFFERS_SHARE = 8
_KV_SHARE = 4
# Blocks that are not full, and the block that vLLM keeps for padding.
_KV_WASTE = 1.05


@dataclass(frozen=True)
class Reserve:
    """Bytes on one rank. kv: of the requests served. workspace: by what it is for."""

    kv_cache: KvCache
    kv: int
    workspace: Mapping[str, int]

    @property
    def total(self) -> int:
        return self.kv + sum(self.workspace.values())


def serving_reserve(
    config: Mapping[str, Any],
    *,
    context: int,
    streams: int,
    chunk: int,
    kv_dtype: str = "auto",
    tp: int = 1,
    drafts: int = 0,
    gpu: bool = True,
    cautious: bool = False,
) -> Reserve:
    """What a rank needs besides weights and experts.

    Args:
        config: config.json. context, streams: tokens of a request, requests at once.
        chunk: prompt tokens a step. kv_dtype: auto, bfloat16 or fp8. tp: tensor-parallel ranks.
        drafts: draft layers that are served. gpu: whether CUDA's context and graphs count.
        cautious: the high ends of what is assumed, not the typical values.

    Raises CheckpointError for a config without the keys that the KV cache follows from.
    """
    text = text_config(config)
    cache = kv_cache(text, dtype=kv_dtype, tp=tp, drafts=drafts)

    def assumed(name: str) -> float:
        value = assumption(name)
        return value.high if cautious else value.typical

    widths = assumed("activation_widths")
    workspace = {"activations": round(chunk * hidden_size(text) * 2 * widths)}
    if gpu:
        workspace["CUDA context"] = round(assumed("gpu_context_gib") * GIB)
        workspace["CUDA graphs"] = round(assumed("gpu_graphs_gib") * GIB)
    return Reserve(cache, cache.nbytes(context, streams), workspace)


def kv_room(cache: KvCache, context: int, streams: int, budget: int) -> tuple[int, int]:
    """Bytes of KV cache to leave where nobody has said how many, and the requests that they hold.

    Of `streams` requests of `context` tokens those that fit into a quarter of the budget (bytes),
    but at least one, without which vLLM does not start.
    """
    each = max(1, round(_KV_WASTE * cache.nbytes(context, 1)))
    requests = max(1, min(streams, budget // _KV_SHARE // each))
    return requests * each, requests


def prefill_buffers(layer_bytes: int, budget: int) -> int:
    """Bytes of the buffers that prefill streams layers through: two layers, or an eighth of what is
    left for experts if that is less."""
    return max(0, min(2 * layer_bytes, budget // _BUFFERS_SHARE))


def host_reserve(ranks: int, gpu: bool) -> int:
    """Bytes of host memory that are not for experts: the system's, and vLLM's processes of all
    ranks on this host."""
    each = assumption("host_process_gib").typical
    if gpu:
        each += assumption("host_staging_gib").typical
    return round((assumption("host_system_gib").typical + ranks * each) * GIB)


def staging_bytes() -> int:
    """Bytes of host memory that loading may take besides the arena."""
    return round(assumption("host_staging_gib").typical * GIB)
