"""What a model needs, and which tier of a machine has room for it."""

from __future__ import annotations

from dataclasses import dataclass

from moet.errors import UnsupportedError
from moet.formats.layout import Precision
from moet.plan.inventory import Inventory, Role
from moet.plan.kv import KvCache, absorbed_bytes
from moet.plan.machine import GIB, Machine
from moet.plan.reserve import host_reserve, prefill_buffers, serving_reserve
from moet.plan.routing import EVEN, distinct_experts, popularity
from moet.plan.workload import Workload
from moet.residency.sizing import STREAMING_SLOTS, fit_rows


@dataclass(frozen=True)
class Needs:
    """Bytes on one rank, besides the pool of experts.

    weights: everything but routed experts. kv: of the workload's context and streams. workspace:
    context, graphs, activations. row: one expert at 2 bits.
    """

    weights: dict[str, int]
    kv_cache: KvCache
    kv: int
    workspace: dict[str, int]
    row: int

    @property
    def fixed(self) -> int:
        """All of it but the row."""
        return sum(self.weights.values()) + self.kv + sum(self.workspace.values())


@dataclass(frozen=True)
class Placement:
    """Where the (layer, expert) pairs' rows are; tiers are exclusive: three that sum to `rows`.

    pool: in the GPU's memory (without a GPU: in RAM). arena: in pinned host memory. disk: in the
    pack only. budget: bytes for the pool on one rank. buffers: bytes that prefill streams through.
    arena_bytes: of host memory, all ranks together. host_fixed: bytes of host memory besides.
    """

    rows: int
    pool: int
    arena: int
    disk: int
    budget: int
    buffers: int
    arena_bytes: int
    host_fixed: int

    @property
    def pool_coverage(self) -> float:
        return self.pool / self.rows

    @property
    def memory_coverage(self) -> float:
        """The share of pairs that are in memory of either kind."""
        return (self.pool + self.arena) / self.rows


def needs(inventory: Inventory, machine: Machine, workload: Workload) -> Needs:
    """What one rank must hold.

    Raises UnsupportedError when tensor parallelism does not divide the experts.
    """
    tp = max(1, machine.count)
    text, geometry = inventory.text, inventory.geometry
    drafted = len(geometry.mtp_layers) if workload.drafts else 0
    roles = [Role.DENSE, Role.EMBEDDING, Role.HEAD, Role.VISION]
    if workload.drafts:
        roles += [Role.DRAFT, Role.DRAFT_EXPERTS]
    weights = {role.value: inventory.rank_bytes(role, tp) for role in roles}
    weights["attention's copies"] = absorbed_bytes(text, tp)
    reserve = serving_reserve(
        text,
        context=workload.context,
        streams=workload.streams,
        chunk=workload.chunk,
        kv_dtype=workload.kv_dtype,
        tp=tp,
        drafts=drafted,
        gpu=machine.gpu is not None,
    )
    return Needs(
        {name: nbytes for name, nbytes in weights.items() if nbytes},
        reserve.kv_cache,
        reserve.kv,
        dict(reserve.workspace),
        rank_row_bytes(inventory, Precision.BASE, tp),
    )


def rank_row_bytes(inventory: Inventory, precision: Precision, tp: int) -> int:
    """Bytes of one rank's part of a row."""
    layout = inventory.layout(precision)
    if layout.slices % tp:
        possible = [n for n in (1, 2, 4, 8) if layout.slices % n == 0]
        raise UnsupportedError(
            f"{tp} GPUs cannot share experts that are {layout.intermediate} wide.",
            f"Use {', '.join(str(n) for n in possible)} of them.",
        )
    return layout.local(tp).row_bytes


def host_fixed(machine: Machine) -> int:
    """Bytes of host memory that are not for experts: the system, and vLLM's processes."""
    return host_reserve(max(1, machine.count), machine.gpu is not None)


def place(inventory: Inventory, machine: Machine, workload: Workload, need: Needs) -> Placement:
    """Fills the tiers from the fastest down; what fits nowhere is on disk."""
    rows, host = inventory.rows, host_fixed(machine)
    limit = workload.pool_limit(rows, need.row)
    budget = free_bytes(machine, workload, need)
    if machine.gpu is None:
        pool = fit_rows(limit, need.row, budget)
        kept = rows if pool == rows else max(0, pool - STREAMING_SLOTS)
        buffers = (pool - kept) * need.row
        return Placement(rows, kept, 0, rows - kept, max(0, budget), buffers, 0, host)
    pool, buffers = fit_rows(limit, need.row, budget), 0
    if pool < rows:
        buffers = prefill_buffers(inventory.geometry.num_experts * need.row, budget)
        pool = fit_rows(limit, need.row, budget - buffers)
    whole = need.row * machine.count
    arena = fit_rows(rows - pool, whole, machine.ram - host)
    return Placement(
        rows, pool, arena, rows - pool - arena, max(0, budget), buffers, arena * whole, host
    )


def missing(
    inventory: Inventory,
    machine: Machine,
    workload: Workload,
    need: Needs,
    placement: Placement,
    disk: int,
) -> list[str]:
    """What keeps the model from being served, in sentences; empty when nothing does.

    disk: bytes that the checkpoint and the pack still need there.
    """
    found = []
    least = min(inventory.rows, STREAMING_SLOTS + 1) * need.row
    tier = "memory of each GPU" if machine.gpu else "memory"
    short = least - free_bytes(machine, workload, need)
    if short > 0:
        found.append(_no_room(machine, workload, need, tier, short))
    if machine.gpu and machine.ram < placement.host_fixed:
        lack = (placement.host_fixed - machine.ram) / GIB
        found.append(f"{lack:.1f} GiB of host memory are missing for vLLM's processes and loading.")
    elif machine.gpu and placement.disk:
        geometry = inventory.geometry
        # Without preferences, which is the most that a step can want on average.
        even = popularity(geometry.num_experts, geometry.top_k, EVEN)
        step = round(distinct_experts(even, workload.tokens))
        if placement.arena < step:
            lack = (step - placement.arena) * need.row * machine.count / GIB
            found.append(
                f"{lack:.1f} GiB of host memory are missing: rows come from disk through it, and a "
                f"layer of one step needs {step} of them."
            )
    if machine.disk.free is not None and machine.disk.free < disk:
        lack = (disk - machine.disk.free) / GIB
        found.append(f"{lack:.0f} GiB of disk are missing for the checkpoint and the pack.")
    return found


def free_bytes(machine: Machine, workload: Workload, need: Needs) -> int:
    """What is left for experts on one rank; negative where what is fixed exceeds what there is."""
    if machine.gpu is None:
        return machine.ram - host_fixed(machine) - need.fixed
    return int(machine.gpu.memory * workload.utilization) - need.fixed


def _no_room(machine: Machine, workload: Workload, need: Needs, tier: str, short: int) -> str:
    gib = f"{short / GIB:.1f} GiB of the {tier} are missing"
    if short > need.kv:
        return f"{gib}: what is not an expert needs {need.fixed / GIB:.1f} GiB."
    fits = need.kv_cache.context(need.kv - short, workload.streams)
    return (
        f"{gib} for the KV cache of {workload.streams} × {workload.context:,} tokens "
        f"({need.kv / GIB:.1f} GiB); {fits:,} tokens each would fit."
    )
