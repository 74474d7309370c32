"""From routing to stages: pairs of token and expert, batches of pairs, the stages of each batch."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit

from moet.formats.layout import TILE
from moet.kernels.cpu.job import HIGH, LOW, ROW, SEGMENT, job_at
from moet.kernels.cpu.memory import call, call_parallel, pointer
from moet.kernels.cpu.stages import order_of

# Below this many products of weight and token (about 150 µs) a stage runs on one thread. A team
# starts in 2 to 15 µs where cores are free, but where they are not it ends a time slice later.
_WORTH_A_TEAM = 8_000_000
_CHUNKS_A_THREAD = 4  # of work taken by ticket; more even out the threads, fewer stream longer
_MOST_DOWN_UNITS = 32


@njit  # type: ignore[untyped-decorator]
def _find(experts: Any, expert: int) -> int:
    """Index of `expert` in the ascending `experts`, or −1."""
    low, high = 0, experts.size
    while low < high:
        middle = (low + high) // 2
        if experts[middle] < expert:
            low = middle + 1
        else:
            high = middle
    return low if low < experts.size and experts[low] == expert else -1


@njit  # type: ignore[untyped-decorator]
def _route(job: Any) -> Any:
    """Sorts the call's pairs by expert, then token; returns where each row's begin [rows + 1]."""
    ids = carray(pointer(job.ids), (job.tokens, job.topk), np.int32)
    weights = carray(pointer(job.weights), (job.tokens, job.topk), np.float32)
    experts = carray(pointer(job.experts), job.rows, np.int64)
    pair_token = carray(pointer(job.pair_token), job.tokens * job.topk, np.int64)
    pair_weight = carray(pointer(job.pair_weight), job.tokens * job.topk, np.float32)
    row_of = np.empty((job.tokens, job.topk), np.int64)
    starts = np.zeros(job.rows + 1, np.int64)
    for token in range(job.tokens):
        for k in range(job.topk):
            row = _find(experts, ids[token, k])
            row_of[token, k] = row
            if row >= 0:
                starts[row + 1] += 1
    for row in range(job.rows):
        starts[row + 1] += starts[row]
    place = starts.copy()
    for token in range(job.tokens):
        for k in range(job.topk):
            row = row_of[token, k]
            if row >= 0:
                pair_token[place[row]] = token
                pair_weight[place[row]] = weights[token, k]
                place[row] += 1
    return starts


@njit  # type: ignore[untyped-decorator]
def _start(address: int, stage: int, units: int, most: int, work: int) -> None:
    """Runs a stage over `units` units of work, taken at most `most` at a time."""
    job = job_at(address)
    threads = 1 if work < _WORTH_A_TEAM or job.region == 0 else job.threads
    job.units = units
    job.chunk = max(1, min(units // (threads * _CHUNKS_A_THREAD), most))
    job.ticket = 0
    if threads == 1:
        call(stage, (address,))
    else:
        call_parallel(job.region, stage, address, threads)


@njit  # type: ignore[untyped-decorator]
def run_job(address: int) -> None:
    job = job_at(address)
    starts = _route(job)
    pairs = starts[-1]
    if pairs == 0:
        return
    precisions = carray(pointer(job.precision), job.rows, np.int64)
    job.orders = 0
    for row in range(job.rows):
        if starts[row + 1] > starts[row]:
            job.orders |= 1 << order_of(precisions[row])
    _start(address, job.records_stage, job.tokens, job.tokens, 16 * job.tokens * job.hidden)

    segments = carray(pointer(job.segments), (job.rows, SEGMENT), np.int64)
    groups = job.intermediate // TILE
    first, row = 0, 0
    while first < pairs:
        end = min(first + job.pairs, pairs)
        count = 0
        while starts[row + 1] <= first:
            row += 1
        while row < job.rows and starts[row] < end:
            low, high = max(starts[row], first), min(starts[row + 1], end)
            if high > low:
                segments[count, ROW], segments[count, LOW], segments[count, HIGH] = row, low, high
                count += 1
            if starts[row + 1] > end:
                break
            row += 1
        job.first_pair, job.segment_count = first, count
        work = (end - first) * job.hidden * job.intermediate
        _start(address, job.gate_up_stage, count * groups, count * groups, 2 * work)
        _start(address, job.down_stage, job.hidden // TILE, _MOST_DOWN_UNITS, work)
        first = end
