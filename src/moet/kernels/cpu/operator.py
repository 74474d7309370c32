"""The operator: checks its arguments, fills in a job and runs it."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moet.formats.layout import TILE, Precision, RowLayout
from moet.kernels.base import OPERATORS, ExpertRows, ExpertsOperator, SwiGLU
from moet.kernels.cpu.activations import RECORD_BYTES
from moet.kernels.cpu.compiled import compiled
from moet.kernels.cpu.job import LAYOUT, SEGMENT, Job, layout_fields
from moet.kernels.cpu.memory import parallel_region
from moet.kernels.cpu.strip import PRECISIONS

_NUMBER = {precision: number for number, precision in enumerate(PRECISIONS)}
_H_BYTES = 16 << 20  # space for activations between gate/up and down; more tokens go in batches


@OPERATORS.register("cpu")
class CpuExperts(ExpertsOperator):
    """Experts computed from packed rows in memory.

    Activations are rounded to 22 bits below the largest of their block of 32, products and sums of
    a block are exact, and blocks are added in float32 in ascending order. For activations of
    normal spread the result is within 10^-6 of the exact one (norm of the error ÷ norm), and
    within 10^-5 of the root mean square in every element.

    An instance keeps its working memory, so one thread at a time may call it.

    Args:
        threads: threads of torch's OpenMP team to use; by default as many as torch does.
    """

    name = "cpu"
    any_swiglu = True

    def __init__(self, threads: int | None = None) -> None:
        self._job = Job(threads=threads or torch.get_num_threads(), region=parallel_region())
        self._memory: dict[str, NDArray[np.uint8]] = {}
        # The rows' descriptions change seldom from call to call, and decode is a few microseconds.
        self._layouts: Mapping[Precision, RowLayout] = {}
        self._layout_fields = np.zeros(0, np.int64)
        self._precisions: list[Precision] = []
        self._precision_numbers = np.zeros(0, np.int64)

    def warm_up(self) -> None:
        """Compiles everything now (seconds once for a machine; then it is read from a cache)."""
        compiled()

    def accumulate(
        self,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        rows: ExpertRows,
        activation: SwiGLU,
        out: Tensor,
    ) -> None:
        count = len(rows.experts)
        if not count or not x.shape[0]:
            return
        layout = next(iter(rows.layouts.values()))
        _check(x, topk_ids, topk_weights, layout.hidden, out)
        x, topk_ids, topk_weights = (
            x.float().contiguous(),
            topk_ids.contiguous(),
            topk_weights.contiguous(),
        )
        experts, address = (np.ascontiguousarray(a, np.int64) for a in (rows.experts, rows.address))
        factor = np.ascontiguousarray(rows.factor, np.float32)
        self._describe(rows)
        job = self._job
        job.x, job.out = x.data_ptr(), out.data_ptr()
        job.ids, job.weights = topk_ids.data_ptr(), topk_weights.data_ptr()
        job.tokens, job.topk = topk_ids.shape
        job.hidden, job.intermediate = layout.hidden, layout.intermediate
        job.rows = count
        job.experts, job.address, job.factor = (_start(a) for a in (experts, address, factor))
        job.limit = _bits(np.inf if activation.limit is None else activation.limit)
        job.alpha, job.beta = _bits(activation.alpha), _bits(activation.beta)
        bias = None if rows.bias is None else np.ascontiguousarray(rows.bias, np.float32)
        job.bias = 0 if bias is None else _start(bias)
        self._reserve(job)
        code = compiled()
        job.strip, job.records_stage = code.strip, code.records_stage
        job.gate_up_stage, job.down_stage = code.gate_up_stage, code.down_stage
        code.run(ctypes.addressof(job))

    def _describe(self, rows: ExpertRows) -> None:
        if rows.layouts != self._layouts:
            self._layouts = dict(rows.layouts)
            fields = [
                layout_fields(k) if k else [0] * LAYOUT for k in map(rows.layouts.get, PRECISIONS)
            ]
            self._layout_fields = np.array(fields, np.int64)
            self._job.layouts = _start(self._layout_fields)
        if rows.precision != self._precisions:
            self._precisions = list(rows.precision)
            self._precision_numbers = np.array([_NUMBER[p] for p in rows.precision], np.int64)
            self._job.precision = _start(self._precision_numbers)

    def _reserve(self, job: Job) -> None:
        """Working memory for the job's sizes."""
        pairs = job.tokens * job.topk
        pair_bytes = job.intermediate // TILE * RECORD_BYTES
        job.pairs = max(1, min(_H_BYTES // pair_bytes, pairs))
        sizes = (
            ("x_records", 2 * job.tokens * (job.hidden // TILE) * RECORD_BYTES),
            ("h_records", job.pairs * pair_bytes),
            ("pair_token", 8 * pairs),
            ("pair_weight", 4 * pairs),
            ("segments", 8 * job.rows * SEGMENT),
        )
        for name, size in sizes:
            if name not in self._memory or self._memory[name].size < size:
                self._memory[name] = np.empty(size, np.uint8)
                setattr(job, name, _start(self._memory[name]))


def _bits(value: float) -> int:
    """A float32's bits, as the compiled code reads it out of the job."""
    bits: int = struct.unpack("i", struct.pack("f", value))[0]
    return bits


def _start(array: NDArray[np.generic]) -> int:
    """Address of an array's first byte; `ctypes.data` takes three times as long."""
    address: int = array.__array_interface__["data"][0]
    return address


def _check(x: Tensor, ids: Tensor, weights: Tensor, hidden: int, out: Tensor) -> None:
    """The compiled code trusts shapes and dtypes; a wrong one would read foreign memory."""
    wanted = x.shape[0], hidden
    if (
        x.dtype in (torch.float32, torch.bfloat16)
        and ids.dtype is torch.int32
        and weights.dtype is out.dtype is torch.float32
        and x.shape == out.shape == wanted
        and ids.shape == weights.shape == (wanted[0], ids.shape[-1])
        and out.is_contiguous()
    ):
        return
    given = ", ".join(f"{t.dtype} {tuple(t.shape)}" for t in (x, ids, weights, out))
    raise TypeError(
        f"wanted x {wanted} float32 or bfloat16, topk_ids int32 and topk_weights float32 "
        f"[{wanted[0]}, k], out {wanted} float32 and contiguous; got {given}."
    )
