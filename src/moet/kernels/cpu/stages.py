"""The three parallel stages: activations to records, gate and up with SwiGLU, down.

Threads take work by ticket, so a slow thread does less of it; who computes an element changes
nothing in it. `schedule` sets the stages up.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit
from numpy.typing import NDArray

from moet.formats.layout import TILE
from moet.kernels.cpu.activations import (
    BASE_ORDER,
    FP4_ORDER,
    RECORD_BYTES,
    bits_float,
    swiglu,
    to_record,
)
from moet.kernels.cpu.job import (
    CODE_BYTES,
    DOWN_CODES,
    DOWN_SCALES,
    GATE_UP_SCALES,
    HIGH,
    LAYOUT,
    LOW,
    ROW,
    SCALE_BYTES,
    SEGMENT,
    SLICE_BYTES,
    SLICE_TILES,
    TICKET_AT,
    job_at,
)
from moet.kernels.cpu.memory import call, fetch_add, pointer
from moet.kernels.cpu.strip import PRECISIONS, natural_rows

# Place in an accumulator of each row of a tile, by precision.
_PLACES = np.array([np.argsort(natural_rows(p)) for p in PRECISIONS], np.int64)
# What the units of codes and scales leave to a matrix's factor: E4M3 is read as half precision
# (2^-8 of its value), FP4 values are doubled.
_UNITS = np.array([256.0, 0.5, 128.0], np.float32)
_DOWN_PAIRS = 16  # tokens whose accumulators are kept at once in the down stage


@njit  # type: ignore[untyped-decorator]
def _group(left: int) -> int:
    """How many of the `left` tokens share the next tiles: as many as a strip takes, none alone."""
    return 2 if left == 4 else min(left, 3)


@njit  # type: ignore[untyped-decorator]
def order_of(precision: int) -> int:
    return BASE_ORDER if precision == 0 else FP4_ORDER


@njit  # type: ignore[untyped-decorator]
def _next_units(address: int, chunk: int, units: int) -> Any:
    first = fetch_add(address + TICKET_AT) * chunk
    return first, min(first + chunk, units)


@njit  # type: ignore[untyped-decorator]
def records_stage(address: int) -> None:
    """x → records, in every order in use. Unit: a token."""
    job = job_at(address)
    blocks = job.hidden // TILE
    x = carray(pointer(job.x), (job.tokens, blocks, TILE), np.float32)
    shape = (2, job.tokens, blocks, RECORD_BYTES)
    digits = carray(pointer(job.x_records), shape, np.uint8)
    words = carray(pointer(job.x_records), (2, job.tokens, blocks, RECORD_BYTES // 4), np.int32)
    while True:
        first, end = _next_units(address, job.chunk, job.units)
        if first >= end:
            return
        for token in range(first, end):
            for order in range(2):
                if job.orders >> order & 1:
                    for block in range(blocks):
                        to_record(
                            x[token, block],
                            order,
                            digits[order, token, block],
                            words[order, token, block],
                        )


@njit  # type: ignore[untyped-decorator]
def gate_up_stage(address: int) -> None:
    """h = SwiGLU(gate · x, up · x) → records. Unit: 32 features of one segment's expert."""
    job = job_at(address)
    blocks, groups = job.hidden // TILE, job.intermediate // TILE
    rows = carray(pointer(job.address), job.rows, np.int64)
    precisions = carray(pointer(job.precision), job.rows, np.int64)
    factors = carray(pointer(job.factor), (job.rows, 3), np.float32)
    layouts = carray(pointer(job.layouts), (len(PRECISIONS), LAYOUT), np.int64)
    segments = carray(pointer(job.segments), (job.segment_count, SEGMENT), np.int64)
    tokens = carray(pointer(job.pair_token), segments[-1, HIGH], np.int64)
    digits = carray(pointer(job.h_records), (job.pairs, groups, RECORD_BYTES), np.uint8)
    words = carray(pointer(job.h_records), (job.pairs, groups, RECORD_BYTES // 4), np.int32)
    bias = carray(pointer(job.bias), (job.rows, 2, groups, TILE), np.float32)
    limit, alpha = bits_float(np.int32(job.limit)), bits_float(np.int32(job.alpha))
    beta = bits_float(np.int32(job.beta))
    acc = np.empty((6, TILE), np.float32)
    gate, up = np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    records = np.empty(3, np.int64)
    while True:
        first, end = _next_units(address, job.chunk, job.units)
        if first >= end:
            return
        for unit in range(first, end):
            segment, group = segments[unit // groups], unit % groups
            row = segment[ROW]
            precision = precisions[row]
            layout = layouts[precision]
            order = order_of(precision)
            start = rows[row] + group // layout[SLICE_TILES] * layout[SLICE_BYTES]
            tile = group % layout[SLICE_TILES] * blocks * 2
            codes = start + tile * layout[CODE_BYTES]
            scales = start + layout[GATE_UP_SCALES] + tile * layout[SCALE_BYTES]
            gate_unit = factors[row, 0] * _UNITS[precision]
            up_unit = factors[row, 1] * _UNITS[precision]
            pair = segment[LOW]
            while pair < segment[HIGH]:
                count = _group(segment[HIGH] - pair)
                for i in range(count):
                    token = order * job.tokens + tokens[pair + i]
                    records[i] = job.x_records + token * blocks * RECORD_BYTES
                acc[:] = 0
                kernel = 3 * precision + count - 1
                at = (kernel, codes, scales, blocks, 2, records.ctypes.data, acc.ctypes.data)
                call(job.strip, at)
                for i in range(count):
                    for k in range(TILE):
                        place = _PLACES[precision, k]
                        gate[k] = acc[i, place] * gate_unit
                        up[k] = acc[count + i, place] * up_unit
                    if job.bias != 0:
                        for k in range(TILE):
                            gate[k] += bias[row, 0, group, k]
                            up[k] += bias[row, 1, group, k]
                    swiglu(gate, up, limit, alpha, beta)
                    index = pair + i - job.first_pair
                    to_record(gate, order, digits[index, group], words[index, group])
                pair += count


@njit  # type: ignore[untyped-decorator]
def down_stage(address: int) -> None:
    """out += weight · (down · h), experts ascending. Unit: 32 features of the output."""
    job = job_at(address)
    width = job.intermediate // TILE
    layouts = carray(pointer(job.layouts), (len(PRECISIONS), LAYOUT), np.int64)
    segments = carray(pointer(job.segments), (job.segment_count, SEGMENT), np.int64)
    rows = carray(pointer(job.address), job.rows, np.int64)
    precisions = carray(pointer(job.precision), job.rows, np.int64)
    acc = np.empty((job.chunk, _DOWN_PAIRS, TILE), np.float32)
    sums = acc.reshape(job.chunk * _DOWN_PAIRS, TILE)
    records = np.empty(3, np.int64)
    while True:
        first, end = _next_units(address, job.chunk, job.units)
        if first >= end:
            return
        for segment in segments:
            row = segment[ROW]
            precision = precisions[row]
            layout = layouts[precision]
            tiles = layout[SLICE_TILES]
            for low in range(segment[LOW], segment[HIGH], _DOWN_PAIRS):
                pairs = min(segment[HIGH] - low, _DOWN_PAIRS)
                sums[: (end - first) * pairs] = 0
                for block in range(0, width, tiles):
                    start = rows[row] + block // tiles * layout[SLICE_BYTES]
                    _down_slice(
                        job.strip,
                        precision,
                        start + layout[DOWN_CODES] + first * tiles * layout[CODE_BYTES],
                        start + layout[DOWN_SCALES] + first * tiles * layout[SCALE_BYTES],
                        tiles,
                        end - first,
                        pairs,
                        job.h_records + ((low - job.first_pair) * width + block) * RECORD_BYTES,
                        width * RECORD_BYTES,
                        layout[CODE_BYTES],
                        layout[SCALE_BYTES],
                        records,
                        sums,
                    )
                _add_to_output(job, row, precision, low, pairs, first, end, sums)


@njit  # type: ignore[untyped-decorator]
def _down_slice(
    strip: int,
    precision: int,
    codes: int,
    scales: int,
    tiles: int,
    units: int,
    pairs: int,
    h_records: int,
    h_stride: int,
    code_bytes: int,
    scale_bytes: int,
    records: NDArray[np.int64],
    sums: NDArray[np.float32],
) -> None:
    """sums [units · pairs, 32] += one slice's part of down · h."""
    for unit in range(units):
        pair = 0
        while pair < pairs:
            count = _group(pairs - pair)
            for i in range(count):
                records[i] = h_records + (pair + i) * h_stride
            arguments = (
                3 * precision + count - 1,
                codes + unit * tiles * code_bytes,
                scales + unit * tiles * scale_bytes,
                tiles,
                1,
                records.ctypes.data,
                sums[unit * pairs + pair :].ctypes.data,
            )
            call(strip, arguments)
            pair += count


@njit  # type: ignore[untyped-decorator]
def _add_to_output(
    job: Any,
    row: int,
    precision: int,
    low: int,
    pairs: int,
    first: int,
    end: int,
    sums: NDArray[np.float32],
) -> None:
    tokens = carray(pointer(job.pair_token), low + pairs, np.int64)
    weights = carray(pointer(job.pair_weight), low + pairs, np.float32)
    out = carray(pointer(job.out), (job.tokens, job.hidden // TILE, TILE), np.float32)
    factors = carray(pointer(job.factor), (job.rows, 3), np.float32)
    scale = factors[row, 2] * _UNITS[precision]
    for unit in range(first, end):
        for pair in range(pairs):
            total = sums[(unit - first) * pairs + pair]
            target = out[tokens[low + pair], unit]
            weight = weights[low + pair]
            for k in range(TILE):
                target[k] += weight * (total[_PLACES[precision, k]] * scale)
