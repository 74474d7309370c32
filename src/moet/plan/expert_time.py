"""Seconds of a layer's experts: of the kernel, and what rows in host memory add to it."""

from __future__ import annotations

import numpy as np

from moet.checkpoints.base import Geometry
from moet.formats.layout import Precision
from moet.plan.machine import Machine
from moet.plan.measured import KernelModel, assumption, kernel_model
from moet.plan.ranges import End, Range
from moet.plan.routing import row_chances

# The kernels were measured on this compute capability.
_MEASURED_SM = 90


def kernel_seconds(
    machine: Machine, geometry: Geometry, row_bytes: float, rows: float, routings: float, end: End
) -> float:
    """Of one layer at 2 bits on a rank, all rows in its pool.

    row_bytes: of the rank's part of a row. rows: experts used. routings: tokens × top-k.
    """
    model = kernel_model("gpu" if machine.gpu else "cpu", Precision.BASE)
    seconds = model.us(rows, rows * row_bytes, read_bandwidth(machine, end)) * 1e-6
    if machine.gpu is not None:
        multiplying = _multiplying(machine, geometry, rows, routings, end)
        seconds = max(seconds, model.launch_us * 1e-6 + multiplying)
    return seconds * _kernel_factor(machine, model, end)


def in_place_seconds(kernel: float, rows: float, absent: float, row_seconds: float) -> float:
    """What a layer takes longer than `kernel` seconds if on average so many of its rows are in host
    memory, and each takes row_seconds over the link. The kernel reads them where they are, beside
    the others: the slower of the two sets the time."""
    chance = row_chances(rows, absent)
    times = np.maximum(kernel, np.arange(len(chance)) * row_seconds)
    return max(0.0, float(chance @ times) - kernel)


def read_bandwidth(machine: Machine, end: End) -> float:
    """Bytes/s of the memory that the kernels read."""
    return (machine.gpu.read if machine.gpu else machine.ram_bandwidth).more(end)


def _multiplying(
    machine: Machine, geometry: Geometry, rows: float, routings: float, end: End
) -> float:
    """Seconds that the GPU's decode kernel takes for a layer's weights and for what each token does
    with them, with memory out of the way: it counts where many tokens choose the same experts."""
    millions = 3e-6 * geometry.hidden * geometry.intermediate / max(1, machine.count)
    us = rows * millions / assumption("expert_mweights_per_us").more(end)
    return (us + routings * millions / assumption("routing_mweights_per_us").more(end)) * 1e-6


def _kernel_factor(machine: Machine, model: KernelModel, end: End) -> float:
    if machine.gpu is None or machine.gpu.sm == _MEASURED_SM:
        error = model.worst_error
        return Range(1 - error, 1, 1 + error).less(end)
    return assumption("kernel_time_elsewhere").less(end)
