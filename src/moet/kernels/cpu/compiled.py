"""The stages as C functions, compiled once for a machine and cached on disk by numba."""

from __future__ import annotations

import ctypes
import functools
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numba import cfunc, types

from moet.formats.layout import Precision
from moet.kernels.cpu.schedule import run_job
from moet.kernels.cpu.stages import down_stage, gate_up_stage, records_stage
from moet.kernels.cpu.strip import TOKEN_GROUPS, make_strip

OF_JOB = types.void(types.int64)
STRIP = types.void(*[types.int64] * 7)

_base1, _base2, _base3 = (make_strip(Precision.BASE, n) for n in TOKEN_GROUPS)
_mxfp1, _mxfp2, _mxfp3 = (make_strip(Precision.MXFP4, n) for n in TOKEN_GROUPS)
_nvfp1, _nvfp2, _nvfp3 = (make_strip(Precision.NVFP4, n) for n in TOKEN_GROUPS)


@dataclass(frozen=True)
class Compiled:
    """run: calls the compiled schedule with the address of a job, without the interpreter's lock.

    The others are the addresses that the job needs.
    """

    run: Callable[[int], None]
    strip: int
    records_stage: int
    gate_up_stage: int
    down_stage: int


@functools.cache
def compiled() -> Compiled:
    """Compiles, or loads what an earlier process compiled."""
    run, *others = (made.address for made in c_functions())
    return Compiled(ctypes.CFUNCTYPE(None, ctypes.c_int64)(run), *others)


def c_functions() -> list[Any]:
    """numba's C functions, in the order of `Compiled`."""
    return [
        cfunc(signature, nopython=True, cache=True)(function)
        for function, signature in _entries(_revision())
    ]


def _revision() -> int:
    """A checksum of this package's sources.

    numba's disk cache notices changes in the file of a cached function, not in what the function
    calls; it does notice the values that a function closes over. So each entry closes over this.
    """
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return functools.reduce(lambda crc, path: zlib.crc32(path.read_bytes(), crc), sources, 0)


def _entries(revision: int) -> list[tuple[Callable[..., None], Any]]:
    def run(job: int) -> None:
        if revision >= 0:
            run_job(job)

    # One function holds every strip, and the stages call it by address: inlined into the stages,
    # its 1,500 vector instructions would be compiled again for each.
    def strip(
        kernel: int, codes: int, scales: int, blocks: int, matrices: int, records: int, acc: int
    ) -> None:
        if revision < 0:
            return
        if kernel == 0:
            _base1(codes, scales, blocks, matrices, records, acc)
        elif kernel == 1:
            _base2(codes, scales, blocks, matrices, records, acc)
        elif kernel == 2:
            _base3(codes, scales, blocks, matrices, records, acc)
        elif kernel == 3:
            _mxfp1(codes, scales, blocks, matrices, records, acc)
        elif kernel == 4:
            _mxfp2(codes, scales, blocks, matrices, records, acc)
        elif kernel == 5:
            _mxfp3(codes, scales, blocks, matrices, records, acc)
        elif kernel == 6:
            _nvfp1(codes, scales, blocks, matrices, records, acc)
        elif kernel == 7:
            _nvfp2(codes, scales, blocks, matrices, records, acc)
        else:
            _nvfp3(codes, scales, blocks, matrices, records, acc)

    def records(job: int) -> None:
        if revision >= 0:
            records_stage(job)

    def gate_up(job: int) -> None:
        if revision >= 0:
            gate_up_stage(job)

    def down(job: int) -> None:
        if revision >= 0:
            down_stage(job)

    return [
        (run, OF_JOB),
        (strip, STRIP),
        (records, OF_JOB),
        (gate_up, OF_JOB),
        (down, OF_JOB),
    ]
