"""What to change to go faster: each change is planned, and its gain is the predicted one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from moet.plan.machine import GIB, Machine
from moet.plan.plan import Plan, replan
from moet.plan.ranges import Range
from moet.plan.workload import Workload

_WORTH = 1.03
_MOST = 5


@dataclass(frozen=True)
class Advice:
    """change: a sentence. decode: predicted tokens/s with it; gain: over the plan's, or None where
    the plan's is not served."""

    change: str
    decode: Range
    gain: float | None


def advise(plan: Plan) -> list[Advice]:
    """Changes that help, the best first; for a plan that is not served, those with which it is."""
    found = []
    for sentence, machine, workload in _changes(plan):
        other = replan(plan, machine, workload)
        if other.decode is None:
            continue
        if plan.decode is None:
            found.append(Advice(sentence, other.decode.rate, None))
            continue
        gain = other.decode.rate.typical / plan.decode.rate.typical
        if gain >= _WORTH:
            found.append(Advice(sentence, other.decode.rate, gain))
    found.sort(key=lambda advice: -advice.decode.typical)
    return found[:_MOST]


def _changes(plan: Plan) -> Iterator[tuple[str, Machine, Workload]]:
    machine, workload, inventory = plan.machine, plan.workload, plan.inventory
    if machine.gpu is not None:
        counts = [n for n in (2, 4, 8) if machine.count < n <= inventory.slices]
        for count in counts[:2]:
            yield f"{count} × {machine.gpu.name}", replace(machine, count=count), workload
    enough = _ram_for_all(plan)
    if enough > machine.ram:
        more = replace(machine, ram=enough)
        yield f"{enough / GIB:.0f} GiB of RAM, so that no expert is read from disk", more, workload
    if plan.placement.disk:
        fast = Range.exactly(max(12e9, 2 * machine.disk.bandwidth.high))
        disk = replace(machine.disk, bandwidth=fast)
        yield (
            f"a disk, or a RAID of them, that reads {fast.typical / 1e9:.0f} GB/s",
            replace(machine, disk=disk),
            workload,
        )
    if workload.kv_dtype != "fp8":
        eight = replace(workload, kv_dtype="fp8")
        yield "the KV cache in FP8 (--kv-cache-dtype fp8)", machine, eight
    if workload.context > 8192:
        half = replace(workload, context=workload.context // 2)
        yield f"a context of {half.context:,} tokens", machine, half
    if workload.chunk > 2048:
        short = replace(workload, chunk=2048)
        yield "prefill in chunks of 2,048 tokens", machine, short
    if inventory.geometry.mtp_layers and not workload.drafts:
        drafting = replace(workload, drafts=1)
        yield "drafting one token a step with the model's MTP layer (--drafts 1)", machine, drafting


def _ram_for_all(plan: Plan) -> int:
    """Host memory with which nothing is left on disk, in steps of 32 GiB."""
    if plan.machine.gpu is None:
        needed = plan.placement.host_fixed + plan.need.fixed + plan.base_bytes()
    else:
        rows = plan.placement.rows - plan.placement.pool
        needed = plan.placement.host_fixed + rows * plan.need.row * plan.machine.count
    step = 32 * GIB
    return -(-needed // step) * step
