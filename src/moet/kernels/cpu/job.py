"""One call of the operator, as the compiled stages see it."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numba import carray, njit

from moet.formats.layout import TILE, RowLayout
from moet.kernels.cpu.memory import pointer


class Job(ctypes.Structure):
    """Arguments and state of a call. All fields are int64; `*` marks an address."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            # from the caller
            "x",  # * float32 [tokens, hidden]
            "ids",  # * int32 [tokens, topk]
            "weights",  # * float32 [tokens, topk]
            "out",  # * float32 [tokens, hidden]
            "tokens",
            "topk",
            "hidden",
            "intermediate",
            "rows",  # experts present
            "experts",  # * int64 [rows], ascending
            "address",  # * int64 [rows]
            "precision",  # * int64 [rows], number in strip.PRECISIONS
            "factor",  # * float32 [rows, 3]
            "layouts",  # * int64 [precisions, LAYOUT fields]
            "limit",  # the bits of SwiGLU's limit as float32; of infinity for none
            "alpha",  # the bits of SwiGLU's alpha and beta as float32
            "beta",
            "bias",  # * float32 [rows, 2, intermediate] of gate and up, or 0
            "threads",
            "region",  # * GOMP_parallel, or 0
            "strip",  # * C function, see `compiled`
            "records_stage",  # * C function of the job's address, like the next two
            "gate_up_stage",
            "down_stage",
            # between the stages, in memory of the caller's
            "x_records",  # * records of x, a set for each order
            "h_records",  # * records of `pairs` rows of h
            "pairs",  # of token and expert, in a batch
            "pair_token",  # * int64 [tokens · topk], sorted by expert, then token
            "pair_weight",  # * float32, likewise
            "segments",  # * int64 [rows, SEGMENT fields]: one expert's pairs of a batch
            "segment_count",
            "first_pair",  # of the batch
            "orders",  # bit set of the record orders in use
            "units",  # of the running stage
            "chunk",  # units taken at once
            "ticket",  # chunks taken
        )
    ]


JOB = np.dtype(Job)
TICKET_AT: int = Job.ticket.offset

ROW, LOW, HIGH = range(3)  # SEGMENT: index into `rows`; its pairs [LOW, HIGH)
SEGMENT = 3

SLICE_TILES, SLICE_BYTES, GATE_UP_SCALES, DOWN_CODES, DOWN_SCALES, CODE_BYTES, SCALE_BYTES = range(
    7
)
LAYOUT = 7


def layout_fields(layout: RowLayout) -> list[int]:
    """A row layout as LAYOUT int64 fields; SLICE_TILES is the slice's width in tiles."""
    return [
        layout.slice_width // TILE,
        layout.slice_bytes,
        layout.gate_up_scales,
        layout.down_codes,
        layout.down_scales,
        layout.tile_code_bytes,
        layout.tile_scale_bytes,
    ]


@njit  # type: ignore[untyped-decorator]
def job_at(address: int) -> Any:
    return carray(pointer(address), 1, JOB)[0]
