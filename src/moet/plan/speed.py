"""How fast: bytes by tier ÷ that tier's bandwidth, and what runs beside it.

docs/planner.md has the formulas. Every input is a range; a prediction is the formula at all slow
ends, at the typical values, and at all fast ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from moet.formats.layout import Precision
from moet.plan.expert_time import in_place_seconds, kernel_seconds, read_bandwidth
from moet.plan.inventory import Inventory, Role
from moet.plan.machine import Gpu, Machine
from moet.plan.measured import assumption, routing_spread
from moet.plan.memory import Needs, Placement
from moet.plan.ranges import End, Range
from moet.plan.routing import (
    Floats,
    distinct_experts,
    hit_rate,
    measured_popularity,
    missing_experts,
    popularity,
    row_chances,
)
from moet.plan.workload import DEPTH, Workload, routing_points

ENDS: tuple[End, ...] = ("slow", "typical", "fast")


@dataclass(frozen=True)
class Prediction:
    """rate: tokens/s of all streams together. seconds: of one step, or of one prefill chunk, by
    cause, at typical inputs. limit: the cause that takes longest. hits: share of routings that find
    their expert in the pool."""

    rate: Range
    seconds: Mapping[str, float]
    limit: str
    hits: Range


@dataclass(frozen=True)
class Case:
    """Everything that a prediction is made from."""

    inventory: Inventory
    machine: Machine
    workload: Workload
    need: Needs
    placement: Placement


def predict_decode(case: Case) -> Prediction:
    """Tokens/s while every stream decodes, at a context of `workload.DEPTH` tokens."""
    return _prediction(case, _decode_seconds, lambda end: _tokens_a_step(case.workload, end))


def predict_prefill(case: Case) -> Prediction:
    """Prompt tokens/s over full chunks."""
    return _prediction(case, _prefill_seconds, lambda end: float(case.workload.chunk))


def _prediction(
    case: Case,
    seconds: Callable[[Case, End], Mapping[str, float]],
    tokens: Callable[[End], float],
) -> Prediction:
    at = {end: seconds(case, end) for end in ENDS}
    rate = {end: tokens(end) / sum(at[end].values()) for end in ENDS}
    typical = {cause: value for cause, value in at["typical"].items() if value > 0}
    hits = {end: hit_rate(_wanted(case, end), case.placement.pool_coverage) for end in ENDS}
    return Prediction(
        Range(rate["slow"], rate["typical"], rate["fast"]),
        typical,
        max(typical, key=lambda cause: typical[cause]),
        Range(*sorted(hits.values())),  # in this order already, but for rounding
    )


def _tokens_a_step(workload: Workload, end: End) -> float:
    """Tokens that a step yields: drafts count until the first that is refused."""
    accepted = assumption("draft_acceptance").more(end)
    return workload.streams * sum(accepted**i for i in range(workload.drafts + 1))


def _decode_seconds(case: Case, end: End) -> dict[str, float]:
    inventory, machine, workload = case.inventory, case.machine, case.workload
    tp = max(1, machine.count)
    memory, read = _memory_name(machine), read_bandwidth(machine, end)
    dense_rate = read * assumption("dense_share").more(end)
    dense = inventory.rank_bytes(Role.DENSE, tp) + inventory.rank_bytes(Role.HEAD, tp)
    layers = inventory.geometry.num_layers
    seconds = {
        f"{memory}: dense layers": dense / dense_rate,
        f"{memory}: KV cache": case.need.kv_cache.read_bytes(
            min(DEPTH, workload.context), workload.streams
        ) / dense_rate,
        "launches and small kernels": layers * _layer_us(machine, end) * 1e-6,
    }  # fmt: skip
    if tp > 1:
        seconds["all-reduce"] = 2 * layers * _allreduce_us(machine, end) * 1e-6
    if workload.drafts:
        seconds["drafting"] = workload.drafts * _draft_bytes(inventory, tp) / dense_rate
    kernel, remote, disk = _layer_experts(case, end)
    seconds[f"{memory}: experts"] = inventory.target_layers * kernel
    seconds["PCIe: experts in host memory"] = inventory.target_layers * remote
    seconds["disk: experts"] = inventory.target_layers * disk
    return seconds


def _layer_experts(case: Case, end: End) -> tuple[float, float, float]:
    """Seconds of one layer's experts: of the kernel with all rows in the pool, those that rows in
    host memory add, and those that rows on disk add."""
    machine, row = case.machine, case.need.row
    tokens, placement = case.workload.tokens, case.placement
    wanted = _wanted(case, end)
    rows = distinct_experts(wanted, tokens)
    geometry = case.inventory.geometry
    kernel = kernel_seconds(machine, geometry, row, rows, tokens * geometry.top_k, end)
    remote = 0.0
    if machine.gpu is not None:
        absent = missing_experts(wanted, placement.pool_coverage, tokens)
        link = machine.gpu.h2d.more(end) * assumption("in_place_share").more(end)
        remote = in_place_seconds(kernel, rows, absent, row / link)
    absent = missing_experts(wanted, placement.memory_coverage, tokens)
    whole = row * max(1, machine.count)
    disk = absent * whole / machine.disk.bandwidth.more(end)
    disk += (
        (1 - float(row_chances(rows, absent)[0])) * assumption("disk_request_us").less(end) * 1e-6
    )
    return kernel, remote, disk


def _prefill_seconds(case: Case, end: End) -> dict[str, float]:
    """A chunk's time. Copies overlap with compute, so the slowest of them sets it; its cause gets
    the time, and the launches come on top."""
    inventory, machine, chunk = case.inventory, case.machine, case.workload.chunk
    geometry, placement, row = inventory.geometry, case.placement, case.need.row
    tp = max(1, machine.count)
    layers = inventory.target_layers
    rows = layers * distinct_experts(_wanted(case, end), chunk)
    weights = inventory.parts[Role.DENSE].weights
    weights += layers * geometry.top_k * 3 * geometry.hidden * geometry.intermediate
    memory = _memory_name(machine)
    dense = inventory.rank_bytes(Role.DENSE, tp)
    causes = {
        "compute": 2 * weights * chunk / tp / _flops(machine, end),
        f"{memory}: weights": (rows * row + dense) / read_bandwidth(machine, end),
        "disk: experts": rows * (1 - placement.memory_coverage) * row * tp
        / machine.disk.bandwidth.more(end),
    }  # fmt: skip
    if machine.gpu is not None:
        remote = rows * (1 - placement.pool_coverage) * row
        link = machine.gpu.h2d.more(end) * assumption("in_place_share").more(end)
        causes["PCIe: experts in host memory"] = remote / link  # a kernel copies them
    slowest = max(causes, key=lambda cause: causes[cause])
    seconds = {slowest: causes[slowest]}
    seconds["launches and small kernels"] = geometry.num_layers * _layer_us(machine, end) * 1e-6
    if tp > 1 and machine.gpu is not None:
        # A ring: each rank sends and receives 2 (n − 1) / n of the activations, twice a layer.
        activations = chunk * geometry.hidden * 2
        nvlink = assumption("nvlink_gb_s").more(end) * 1e9
        link = nvlink if machine.gpu.link == "nvlink" else machine.gpu.h2d.more(end)
        passes = 2 * geometry.num_layers * 2 * (tp - 1) / tp
        seconds["all-reduce"] = passes * activations / link
    return seconds


def advised_chunk(inventory: Inventory, machine: Machine) -> int:
    """Prompt tokens a step at which computing a layer takes as long as copying it to the GPU.

    A power of two between 2048 and 8192. Depends on links and compute, not on how much fits.
    """
    if machine.gpu is None:
        return 2048
    geometry, tp = inventory.geometry, max(1, machine.count)
    layer = inventory.layout(Precision.BASE).row_bytes / tp * geometry.num_experts
    flops = 6 * geometry.top_k * geometry.hidden * geometry.intermediate / tp
    tokens = layer / machine.gpu.h2d.typical * _flops(machine, "typical") / flops
    return int(min(8192, max(2048, 2 ** round(np.log2(max(tokens, 1))))))


def _draft_bytes(inventory: Inventory, tp: int) -> int:
    """Bytes that one drafting step reads: the draft layers, the head, and top-k experts of each."""
    geometry = inventory.geometry
    experts = inventory.rank_bytes(Role.DRAFT_EXPERTS, tp) * geometry.top_k // geometry.num_experts
    return inventory.rank_bytes(Role.DRAFT, tp) + inventory.rank_bytes(Role.HEAD, tp) + experts


def _wanted(case: Case, end: End) -> Floats:
    geometry = case.inventory.geometry
    if points := routing_points(case.workload.routing):
        return measured_popularity(geometry.num_experts, geometry.top_k, points)
    spread = routing_spread(geometry.architecture).less(end)
    return popularity(geometry.num_experts, geometry.top_k, spread)


def _memory_name(machine: Machine) -> str:
    return "GPU memory" if machine.gpu else "RAM"


def _layer_us(machine: Machine, end: End) -> float:
    return assumption("layer_us" if machine.gpu else "cpu_layer_us").less(end)


def _allreduce_us(machine: Machine, end: End) -> float:
    link = machine.gpu.link if machine.gpu else "pcie"
    return assumption(f"allreduce_us_{link}").less(end)


def _flops(machine: Machine, end: End) -> float:
    """Multiplications and additions a second that prefill reaches on one rank."""
    gpu: Gpu | None = machine.gpu
    if gpu is None:
        return assumption("cpu_gflops_per_core").more(end) * machine.cores * 1e9
    peak = gpu.tflops
    if peak is None:
        peak = gpu.bandwidth / 1e9 * assumption("tflops_per_gb_s").more(end)
    return peak * 1e12 * assumption("compute_share").more(end)
