"""One call of the operator, as the compiled stages see it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit

from moet.formats.layout import TILE, RowLayout
from moet.kernels.cpu.memory import pointer

# Addresses are int64. Sizes in elements unless "bytes" is said.
JOB = np.dtype(
    [
        # from the caller
        ("x", np.int64),  # float32 [tokens, hidden]
        ("ids", np.int64),  # int32 [tokens, topk]
        ("weights", np.int64),  # float32 [tokens, topk]
        ("out", np.int64),  # float32 [tokens, hidden]
        ("tokens", np.int64),
        ("topk", np.int64),
        ("hidden", np.int64),
        ("intermediate", np.int64),
        ("rows", np.int64),  # experts present
        ("experts", np.int64),  # int64 [rows], ascending
        ("address", np.int64),  # int64 [rows]
        ("precision", np.int64),  # int64 [rows], number in strip.PRECISIONS
        ("factor", np.int64),  # float32 [rows, 3]
        ("layouts", np.int64),  # int64 [precisions, LAYOUT fields]
        ("limit", np.float64),  # of SwiGLU; infinite for none
        ("x_records", np.int64),  # space for the records of x, one set for each order
        ("h_records", np.int64),  # space for the records of `pairs` rows of h
        ("pairs", np.int64),
        ("threads", np.int64),
        ("region", np.int64),  # GOMP_parallel
        ("strip", np.int64),  # C function, see `strip.call_strip`
        ("records_stage", np.int64),  # the stages, as C functions of the job's address
        ("gate_up_stage", np.int64),
        ("down_stage", np.int64),
        # between the stages, in memory of the caller's
        ("pair_token", np.int64),  # int64 [tokens · topk], sorted by expert, then token
        ("pair_weight", np.int64),  # float32, likewise
        ("segments", np.int64),  # int64 [rows, SEGMENT fields]: one expert's pairs of a batch
        ("segment_count", np.int64),
        ("first_pair", np.int64),  # of the batch
        ("orders", np.int64),  # bit set of the record orders in use
        ("units", np.int64),  # of the running stage
        ("chunk", np.int64),  # units taken at once
        ("ticket", np.int64),  # chunks taken
    ]
)
TICKET_AT: int = JOB.fields["ticket"][1] if JOB.fields else 0

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
