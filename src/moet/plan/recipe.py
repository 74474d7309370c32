"""The recipe that a plan comes to."""

from __future__ import annotations

from typing import Any

from moet.plan.plan import Plan
from moet.plan.ranges import Range
from moet.recipes import Recipe
from moet.recipes.recipe import Predicted


def recipe_of(plan: Plan, model: str) -> Recipe | None:
    """What `moet serve` takes to do what was planned; None for a plan that is not served.

    model: as the user named it, a hub name or a directory.
    """
    if plan.decode is None or plan.prefill is None:
        return None
    placement, workload, machine = plan.placement, plan.workload, plan.machine
    vllm: dict[str, Any] = {
        "max-model-len": workload.context,
        "max-num-seqs": workload.streams,
        "max-num-batched-tokens": workload.chunk,
    }
    if machine.gpu is not None:
        vllm["gpu-memory-utilization"] = workload.utilization
    if machine.count > 1:
        vllm["tensor-parallel-size"] = machine.count
    if workload.kv_dtype != "auto":
        vllm["kv-cache-dtype"] = workload.kv_dtype
    if workload.drafts:
        vllm["speculative-config"] = {
            "method": "mtp",
            "num_speculative_tokens": workload.drafts,
        }
    slots = placement.pool
    if machine.gpu is None:
        slots += placement.buffers // plan.need.row
    return Recipe(
        model=model,
        revision=plan.revision,
        hardware=machine.name,
        status="planned",
        predicted=Predicted(decode=_rounded(plan.decode.rate), prefill=_rounded(plan.prefill.rate)),
        moet={"base_pool": "100%" if slots == placement.rows else str(slots)},
        vllm=vllm,
    )


def _rounded(rate: Range) -> tuple[float, float, float]:
    low, typical, high = (float(f"{x:.3g}") for x in (rate.low, rate.typical, rate.high))
    return low, typical, high
