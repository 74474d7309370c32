"""Waiting for the device, and telling it things, in compiled code without the interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import intrinsic
from numpy.typing import NDArray

U64 = NDArray[np.uint64]

_STEP_NAP, _IDLE_NAP = 10, 100  # µs
_MONOTONIC = 1  # of time.h
_SET_TIMER_SLACK = 29  # of sys/prctl.h

_usleep = types.ExternalFunction("usleep", types.intc(types.uintc))
_clock_gettime = types.ExternalFunction("clock_gettime", types.intc(types.intc, types.uintp))
_prctl = types.ExternalFunction("prctl", types.intc(types.intc, *[types.uint64] * 4))


@intrinsic  # type: ignore[untyped-decorator]
def _fence(context: Any) -> Any:
    """Everything stored before is visible to the device before anything is loaded after."""

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")
        return target.get_dummy_value()

    return types.none(), generate


@njit(cache=True)  # type: ignore[untyped-decorator]
def _nanoseconds(parts: NDArray[np.int64]) -> Any:
    _clock_gettime(_MONOTONIC, parts.ctypes.data)
    return parts[0] * 1_000_000_000 + parts[1]


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def wait_for_request(
    request: U64, begun: U64, done: U64, seen: int, other: U64, other_seen: int, microseconds: int
) -> None:
    """Until the request's number exceeds `seen`, `other` is not `other_seen`, or the time is over.

    Between steps naps may be as long as it takes a step to come to its first request. All numbers:
    uint64 [1], changed by the device.
    """
    parts = np.empty(2, np.int64)
    _prctl(_SET_TIMER_SLACK, 1, 0, 0, 0)
    end = _nanoseconds(parts) + microseconds * 1000
    while np.int64(request[0]) <= seen and np.int64(other[0]) == other_seen:
        left = end - _nanoseconds(parts)
        if left <= 0:
            break
        nap = _STEP_NAP if begun[0] != done[0] else _IDLE_NAP
        _usleep(max(1, min(nap, left // 1000)))
    _fence()


@njit(cache=True)  # type: ignore[untyped-decorator]
def store(target: U64, places: NDArray[np.int64], values: U64) -> None:
    """target[places] = values, in this order; seen by the device before what is loaded next."""
    _fence()
    for i in range(places.size):
        target[places[i]] = values[i]
    _fence()
