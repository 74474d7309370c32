"""A plan: what a model needs, where it goes on a machine, and how fast it should be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moet.formats.layout import Precision
from moet.plan.inventory import Inventory
from moet.plan.machine import Machine
from moet.plan.memory import Needs, Placement, free_bytes, missing, needs, place
from moet.plan.model_files import ModelFiles
from moet.plan.ranges import Range
from moet.plan.speed import Case, Prediction, advised_chunk, predict_decode, predict_prefill
from moet.plan.workload import DEFAULT_CONTEXT, Workload
from moet.residency.sizing import fit_rows

SCHEMA = 1


@dataclass(frozen=True)
class DiskBytes:
    """Bytes on disk: the checkpoint (which also has the FP4 rows where it is FP4), and the pack."""

    checkpoint: int
    pack: int

    @property
    def total(self) -> int:
        return self.checkpoint + self.pack


@dataclass(frozen=True)
class Plan:
    """model: its name. local: whether its checkpoint is on this machine already. missing: what
    keeps it from being served, in sentences; empty if it is served. decode, prefill: None when
    something is missing. max_context: tokens that each stream could have with no expert in the
    GPU's memory."""

    model: str
    revision: str | None
    local: bool
    inventory: Inventory
    machine: Machine
    workload: Workload
    need: Needs
    placement: Placement
    disk: DiskBytes
    missing: tuple[str, ...]
    decode: Prediction | None
    prefill: Prediction | None
    max_context: int

    @property
    def case(self) -> Case:
        return Case(self.inventory, self.machine, self.workload, self.need, self.placement)

    def base_bytes(self) -> int:
        """The whole 2-bit base of the target model, all ranks together."""
        return self.inventory.rows * self.inventory.layout(Precision.BASE).row_bytes

    def fp4_bytes(self) -> int:
        """All experts of the target model at FP4."""
        return self.inventory.rows * self.inventory.layout(self.inventory.fp4).row_bytes

    def to_json(self) -> dict[str, Any]:
        """The plan as plain values: stable keys, bytes as integers, rates to four digits."""
        geometry, machine = self.inventory.geometry, self.machine
        tp = max(1, machine.count)
        return {
            "schema": SCHEMA,
            "model": {
                "name": self.model,
                "revision": self.revision,
                "architecture": geometry.architecture,
                "layers": geometry.num_layers,
                "moe_layers": self.inventory.target_layers,
                "experts": geometry.num_experts,
                "top_k": geometry.top_k,
                "tensors": self.inventory.tensors,
                "attention": self.need.kv_cache.kind,
            },
            "hardware": _hardware(machine),
            "workload": {
                "context": self.workload.context,
                "streams": self.workload.streams,
                "kv_cache_dtype": self.workload.kv_dtype,
                "drafts": self.workload.drafts,
                "chunk": self.workload.chunk,
                "utilization": self.workload.utilization,
                "base_pool": self.workload.base_pool,
                "routing": self.workload.routing,
            },
            "bytes": {
                "checkpoint": {
                    role.value: part.total for role, part in self.inventory.parts.items()
                },
                "base": self.base_bytes(),
                "fp4": self.fp4_bytes(),
                "fp4_format": self.inventory.fp4.value,
                "base_row": self.inventory.layout(Precision.BASE).row_bytes,
                "kv_per_token": self.need.kv_cache.per_token,
                "kv_per_stream": self.need.kv_cache.per_stream,
            },
            "rank": {
                "ranks": tp,
                "row": self.need.row,
                "weights": self.need.weights,
                "kv_cache": self.need.kv,
                "workspace": self.need.workspace,
                "pool_budget": self.placement.budget,
                "prefill_buffers": self.placement.buffers,
            },
            "tiers": {
                "rows": self.placement.rows,
                "pool": self.placement.pool,
                "arena": self.placement.arena,
                "disk": self.placement.disk,
                "pool_coverage": round(self.placement.pool_coverage, 4),
                "memory_coverage": round(self.placement.memory_coverage, 4),
                "arena_bytes": self.placement.arena_bytes,
            },
            "host_load_peak": self.host_load_peak(),
            "disk": {"checkpoint": self.disk.checkpoint, "pack": self.disk.pack},
            "max_context": self.max_context,
            "fits": not self.missing,
            "missing": list(self.missing),
            "decode": _prediction(self.decode),
            "prefill": _prediction(self.prefill),
        }

    def arena_rows(self) -> int:
        """Rows that host memory has room for, were none in the pool."""
        return fit_rows(
            self.placement.rows,
            self.need.row * max(1, self.machine.count),
            self.machine.ram - self.placement.host_fixed,
        )

    def host_load_peak(self) -> int:
        """The most host memory that loading takes, all ranks together."""
        if self.machine.gpu is None:
            pool = self.placement.pool * self.need.row + self.placement.buffers
            return self.placement.host_fixed + self.need.fixed + pool
        return self.placement.host_fixed + self.placement.arena_bytes


def make_plan(
    files: ModelFiles, inventory: Inventory, machine: Machine, workload: Workload | None = None
) -> Plan:
    """Plans a model for a machine.

    workload: default: one stream, the model's own context up to 32,768 tokens, and the chunk that
    the machine's links advise. Raises UnsupportedError when the GPUs cannot share the experts.
    """
    if workload is None:
        workload = default_workload(inventory, machine)
    need = needs(inventory, machine, workload)
    placement = place(inventory, machine, workload, need)
    disk = DiskBytes(inventory.checkpoint_bytes, _pack_bytes(inventory))
    wanted = disk.pack + (0 if files.local else disk.checkpoint)
    lacking = tuple(missing(inventory, machine, workload, need, placement, wanted))
    case = Case(inventory, machine, workload, need, placement)
    room = need.kv + free_bytes(machine, workload, need)
    return Plan(
        files.name,
        files.revision,
        files.local,
        inventory,
        machine,
        workload,
        need,
        placement,
        disk,
        lacking,
        None if lacking else predict_decode(case),
        None if lacking else predict_prefill(case),
        min(model_context(inventory), need.kv_cache.context(room, workload.streams)),
    )


def replan(plan: Plan, machine: Machine, workload: Workload) -> Plan:
    """The same model on another machine or with other work."""
    files = ModelFiles(plan.model, plan.revision, {}, None, plan.local, lambda: iter(()))
    return make_plan(files, plan.inventory, machine, workload)


def default_workload(inventory: Inventory, machine: Machine) -> Workload:
    """One stream, and as much context as the model has, up to 32,768 tokens."""
    return Workload(
        context=min(model_context(inventory), DEFAULT_CONTEXT),
        chunk=advised_chunk(inventory, machine),
    )


def model_context(inventory: Inventory) -> int:
    """Tokens that the model's config allows."""
    value = inventory.text.get("max_position_embeddings")
    return value if isinstance(value, int) and value > 0 else DEFAULT_CONTEXT


def _pack_bytes(inventory: Inventory) -> int:
    """Rows of a pack: all at 2 bits; FP4 rows besides where the checkpoint has none."""
    geometry = inventory.geometry
    rows = len(geometry.moe_layers) * geometry.num_experts
    row = inventory.layout(Precision.BASE).row_bytes
    if not inventory.source_is_fp4:
        row += inventory.layout(Precision.MXFP4).row_bytes
    return rows * row


def _hardware(machine: Machine) -> dict[str, Any]:
    gpu = machine.gpu
    return {
        "gpu": None
        if gpu is None
        else {
            "name": gpu.name,
            "count": machine.count,
            "memory": gpu.memory,
            "bandwidth_gb_s": _digits(gpu.bandwidth / 1e9),
            "h2d_gb_s": _range(gpu.h2d.times(1e-9)),
            "source": gpu.source,
        },
        "ram": machine.ram,
        "cores": machine.cores if gpu is None else None,
        "disk_free": machine.disk.free,
        "disk_gb_s": _range(machine.disk.bandwidth.times(1e-9)),
        "notes": list(machine.notes),
    }


def _prediction(prediction: Prediction | None) -> dict[str, Any] | None:
    if prediction is None:
        return None
    return {
        "tokens_per_second": _range(prediction.rate),
        "limit": prediction.limit,
        "milliseconds": {
            cause: _digits(seconds * 1e3) for cause, seconds in prediction.seconds.items()
        },
        "pool_hit_rate": _range(prediction.hits),
    }


def _range(value: Range) -> Mapping[str, float]:
    return {name: _digits(getattr(value, name)) for name in ("low", "typical", "high")}


def _digits(value: float) -> float:
    return float(f"{value:.4g}")
