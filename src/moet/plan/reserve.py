"""What a rank that serves must leave to everything but experts: for pools set to `auto`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moet.plan.inventory import text_config
from moet.plan.kv import KvCache, hidden_size, kv_cache
from moet.plan.machine import GIB
from moet.plan.measured import assumption


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
) -> Reserve:
    """What a rank needs besides weights and experts.

    Args:
        config: config.json. context, streams: tokens of a request, requests at once.
        chunk: prompt tokens a step. kv_dtype: auto, bfloat16 or fp8. tp: tensor-parallel ranks.
        drafts: draft layers that are served. gpu: whether CUDA's context and graphs count.

    Raises CheckpointError for a config without the keys that the KV cache follows from.
    """
    text = text_config(config)
    cache = kv_cache(text, dtype=kv_dtype, tp=tp, drafts=drafts)
    widths = assumption("activation_widths").typical
    workspace = {"activations": round(chunk * hidden_size(text) * 2 * widths)}
    if gpu:
        workspace["CUDA context"] = round(assumption("gpu_context_gib").typical * GIB)
        workspace["CUDA graphs"] = round(assumption("gpu_graphs_gib").typical * GIB)
    return Reserve(cache, cache.nbytes(context, streams), workspace)
