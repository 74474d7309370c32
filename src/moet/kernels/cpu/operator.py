"""The operator: checks its arguments, fills in a job and runs it."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moet.formats.layout import TILE
from moet.kernels.base import OPERATORS, ExpertRows, ExpertsOperator, SwiGLU
from moet.kernels.cpu.activations import RECORD_BYTES
from moet.kernels.cpu.compiled import compiled
from moet.kernels.cpu.job import JOB, LAYOUT, SEGMENT, layout_fields
from moet.kernels.cpu.memory import parallel_region
from moet.kernels.cpu.strip import PRECISIONS

_NUMBER = {precision: number for number, precision in enumerate(PRECISIONS)}
_H_BYTES = 16 << 20  # space for activations between gate/up and down; more tokens go in batches


@OPERATORS.register("cpu")
class CpuExperts(ExpertsOperator):
    """Experts computed from packed rows in memory.

    Activations are rounded to 22 bits below the largest of their block of 32, products and sums of
    a block are exact, and blocks are added in float32 in ascending order: the result is within
    2·10^-6 of the exact one, relative to the root mean square of the output.

    An instance keeps its working memory, so one thread at a time may call it.

    Args:
        threads: threads of torch's OpenMP team to use; by default as many as torch does.
    """

    name = "cpu"

    def __init__(self, threads: int | None = None) -> None:
        self._threads = threads or torch.get_num_threads()
        self._region = parallel_region()
        self._x_records = np.empty(0, np.uint8)
        self._h_records = np.empty(0, np.uint8)

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
        layouts = [rows.layouts.get(p) for p in PRECISIONS]
        shape = next((layout for layout in layouts if layout), None)
        if shape is None or not len(rows.experts) or not x.shape[0]:
            return
        _check(x, topk_ids, topk_weights, shape.hidden, out)
        tokens, topk = topk_ids.shape
        x, topk_ids, topk_weights = (
            x.to(torch.float32).contiguous(),
            topk_ids.contiguous(),
            topk_weights.contiguous(),
        )
        if len(rows.layouts) == 1:
            precision = np.full(len(rows.experts), _NUMBER[next(iter(rows.layouts))], np.int64)
        else:
            precision = np.array([_NUMBER[p] for p in rows.precision], np.int64)
        fields = np.array([layout_fields(k) if k else [0] * LAYOUT for k in layouts], np.int64)
        experts, address = (np.ascontiguousarray(a, np.int64) for a in (rows.experts, rows.address))
        factor = np.ascontiguousarray(rows.factor, np.float32)

        code = compiled()
        x_bytes = 2 * tokens * (shape.hidden // TILE) * RECORD_BYTES
        pair_bytes = (shape.intermediate // TILE) * RECORD_BYTES
        pairs = max(1, min(_H_BYTES // pair_bytes, tokens * topk))
        self._x_records = _at_least(self._x_records, x_bytes)
        self._h_records = _at_least(self._h_records, pairs * pair_bytes)
        pair_token = np.empty(tokens * topk, np.int64)
        pair_weight = np.empty(tokens * topk, np.float32)
        segments = np.empty((len(experts), SEGMENT), np.int64)
        job = np.zeros(1, JOB)
        values = {
            "x": x.data_ptr(),
            "ids": topk_ids.data_ptr(),
            "weights": topk_weights.data_ptr(),
            "out": out.data_ptr(),
            "tokens": tokens,
            "topk": topk,
            "hidden": shape.hidden,
            "intermediate": shape.intermediate,
            "rows": len(experts),
            "experts": experts.ctypes.data,
            "address": address.ctypes.data,
            "precision": precision.ctypes.data,
            "factor": factor.ctypes.data,
            "layouts": fields.ctypes.data,
            "limit": np.inf if activation.limit is None else activation.limit,
            "x_records": self._x_records.ctypes.data,
            "h_records": self._h_records.ctypes.data,
            "pairs": pairs,
            "threads": self._threads,
            "region": self._region,
            "strip": code.strip,
            "records_stage": code.records_stage,
            "gate_up_stage": code.gate_up_stage,
            "down_stage": code.down_stage,
            "pair_token": pair_token.ctypes.data,
            "pair_weight": pair_weight.ctypes.data,
            "segments": segments.ctypes.data,
        }
        for name, value in values.items():
            job[name] = value
        code.run(job.ctypes.data)


def _at_least(memory: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    return memory if memory.size >= size else np.empty(size, np.uint8)


def _check(x: Tensor, ids: Tensor, weights: Tensor, hidden: int, out: Tensor) -> None:
    """The compiled code trusts shapes and dtypes; a wrong one would read foreign memory."""
    if x.dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(f"x is {x.dtype}; the experts take float32 or bfloat16.")
    wanted = (
        ("x", x, x.dtype, (x.shape[0], hidden)),
        ("topk_ids", ids, torch.int32, (x.shape[0], ids.shape[-1])),
        ("topk_weights", weights, torch.float32, tuple(ids.shape)),
        ("out", out, torch.float32, (x.shape[0], hidden)),
    )
    for name, tensor, dtype, shape in wanted:
        if tensor.dtype != dtype or tuple(tensor.shape) != shape:
            raise TypeError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)}; wanted {dtype} {shape}."
            )
    if not out.is_contiguous():
        raise TypeError("out must be contiguous: results are added to it in place.")
