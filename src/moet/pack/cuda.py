"""Level 0 on an NVIDIA GPU: an expert's rows from its stored parts, to the bits of the CPU's."""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from moet.checkpoints.base import PROJECTIONS, ExpertSource, MatrixSource
from moet.formats.base import FORMATS
from moet.formats.layout import TILE, Precision, RowLayout
from moet.formats.numbers import E4M3_VALUES
from moet.kernels.cuda.compiler import cached_cubin
from moet.kernels.cuda.launch import Kernel
from moet.kernels.cuda.target import Target
from moet.pack.cuda_decode import Decoder, Stored
from moet.pack.encode import EncodedRows, RowEncoder
from moet.pack.files import U8
from moet.pack.lane import Lane, aligned
from moet.pack.layer import LayerLayout
from moet.quantize.base import BLOCK
from moet.quantize.data_free import matrix_factor
from moet.quantize.statistics import MatrixStatistics, from_sums

_MAX_BLOCKS = 1024  # of a row of weights, which the kernel keeps in shared memory
_INFINITY_BITS = 0x7F800000
_THREADS = 256
_ROWS_AT_ONCE = 8  # of the kernel `statistics`
_USED_AT, _SUMS_AT = 48, 304  # in what it writes
_EXPERT_BYTES = 2**30  # more than an expert of 7168 × 2048 takes
_LANES = 3  # more threads that launch would wait for each other, and for Python's lock


class _Coded(NamedTuple):
    """A matrix for a row: codes uint8 [N, K], scales uint8 [N, K / block]."""

    codes: Tensor
    scales: Tensor


class _Made(NamedTuple):
    """An expert's rows and factors, and what `statistics` wrote for each matrix, on the host."""

    base: U8
    base_factor: list[float]
    fp4: U8 | None
    fp4_factor: list[float]
    sums: list[U8]


class CudaEncoder(RowEncoder):
    """Decodes, quantizes (`DataFreeQuantizer`), measures and lays out experts on one GPU.

    Any number of threads may use one instance at the same time; a few at once have a lane. What it
    refuses, such as weights that are not finite, is left to the CPU, which says what is wrong.

    Raises UnsupportedError for a GPU below compute capability 8.0, ConfigError without NVRTC.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept = threading.local()
        with torch.cuda.device(device):
            properties: Any = torch.cuda.get_device_properties(device)
            target = Target.of(properties.major, properties.minor)
            cubin = cached_cubin("pack.cu", target.architecture, {})
            self._search = Kernel(cubin, "search")
            self._statistics = Kernel(cubin, "statistics")
            self._encode_mxfp4 = Kernel(cubin, "encode_mxfp4")
            self._tiles = Kernel(cubin, "tiles")
            self._decoder = Decoder(device)
            self._scale_values = torch.from_numpy(np.array(E4M3_VALUES)).to(device)
            free, _ = torch.cuda.mem_get_info(device)
            self._lanes: queue.LifoQueue[Lane] = queue.LifoQueue()
            for _ in range(max(1, min(_LANES, free // _EXPERT_BYTES))):
                self._lanes.put(Lane(device))

    def encode(self, source: ExpertSource, layout: LayerLayout) -> EncodedRows | None:
        try:
            return self._encode(source, layout)
        except torch.OutOfMemoryError:  # others may be using this GPU
            return None

    def _encode(self, source: ExpertSource, layout: LayerLayout) -> EncodedRows | None:
        if layout.base.hidden > BLOCK * _MAX_BLOCKS or layout.base.intermediate > (
            BLOCK * _MAX_BLOCKS
        ):
            return None
        with self._lane() as lane:
            made = self._make(lane, source, layout)
        if made is None:
            return None
        counts = (math.prod(source[of].shape) for of in PROJECTIONS)
        return EncodedRows(
            base=made.base,
            base_factor=np.array(made.base_factor, np.float32),
            fp4=made.fp4,
            fp4_factor=np.array(made.fp4_factor, np.float32),
            statistics=[*map(measured_statistics, made.sums, counts, made.base_factor)],
        )

    def _make(self, lane: Lane, source: ExpertSource, layout: LayerLayout) -> _Made | None:
        """All that the GPU does of an expert; None where a weight is not finite or a scale bad."""
        parts = (part for of in PROJECTIONS for part in source[of].parts.values())
        lane.begin(sum(aligned(part.nbytes) for part in parts))
        stored = [self._decode(lane, source[of]) for of in PROJECTIONS]
        largest = [(of.weight.view(torch.int32) & 0x7FFFFFFF).max() for of in stored]
        found = lane.to_host("checks", torch.stack([*largest, *(of.bad.int() for of in stored)]))
        lane.stream.synchronize()
        checks = found.view(np.int32).tolist()
        if max(checks[:3]) >= _INFINITY_BITS or any(checks[3:]):
            return None
        factors = [matrix_factor(bits) for bits in checks[:3]]
        coded = [
            self._quantize(of.weight, factor) for of, factor in zip(stored, factors, strict=True)
        ]
        base, fp4 = lane.to_host("base", self._row(layout.base, coded)), None
        if layout.fp4_in_pack:
            of_fp4 = [self._fp4(layout.fp4.precision, of) for of in stored]
            fp4 = lane.to_host("fp4", self._row(layout.fp4, of_fp4))
        sums = [
            lane.to_host(projection, self._measure(of.weight, coding, factor))
            for projection, of, coding, factor in zip(
                PROJECTIONS, stored, coded, factors, strict=True
            )
        ]
        lane.stream.synchronize()
        return _Made(
            self._keep("base", base),
            factors,
            None if fp4 is None else self._keep("fp4", fp4),
            [1.0 if of.fp4 is None else of.fp4[2] for of in stored],
            [of.copy() for of in sums],
        )

    @contextmanager
    def _lane(self) -> Iterator[Lane]:
        """One that no other thread has, its stream current; waits for one."""
        lane = self._lanes.get()
        try:
            with torch.cuda.device(self._device), torch.cuda.stream(lane.stream):
                try:
                    yield lane
                finally:
                    lane.stream.synchronize()  # an error may have left copies from its memory
        finally:
            self._lanes.put(lane)

    def _keep(self, use: str, row: U8) -> U8:
        """A copy in this thread's memory, until its next one for the same use."""
        kept: U8 | None = getattr(self._kept, use, None)
        if kept is None or kept.shape != row.shape:
            kept = np.empty_like(row)
            setattr(self._kept, use, kept)
        np.copyto(kept, row)
        return kept

    def _decode(self, lane: Lane, matrix: MatrixSource) -> Stored:
        moved = {
            name: lane.to_device(matrix.parts[name], self._device)
            if matrix.parts[name].ndim
            else matrix.parts[name]
            for name in FORMATS[matrix.format].parts
        }
        return self._decoder.decode(matrix.format, moved)

    def _quantize(self, weight: Tensor, factor: float) -> _Coded:
        rows, cols = weight.shape
        blocks = cols // BLOCK
        codes = torch.empty(weight.shape, dtype=torch.uint8, device=self._device)
        scales = torch.empty(rows, blocks, dtype=torch.uint8, device=self._device)
        threads = min(-(-blocks // 32) * 32, _THREADS)
        inverse = float(np.float32(1 / (2.5 * factor)))
        self._launch(
            self._search, rows, threads,
            [weight, self._scale_values, codes, scales, blocks, factor, inverse],
        )  # fmt: skip
        return _Coded(codes, scales)

    def _fp4(self, precision: Precision, of: Stored) -> _Coded:
        """As stored, or our own MXFP4."""
        if of.fp4 is not None:
            return _Coded(*of.fp4[:2])
        assert precision is Precision.MXFP4
        rows, cols = of.weight.shape
        codes = torch.empty(of.weight.shape, dtype=torch.uint8, device=self._device)
        scales = torch.empty(rows, cols // BLOCK, dtype=torch.uint8, device=self._device)
        grid = -(-scales.numel() // _THREADS)
        self._launch(self._encode_mxfp4, grid, _THREADS, [of.weight, codes, scales, scales.numel()])
        return _Coded(codes, scales)

    def _measure(self, weight: Tensor, coded: _Coded, factor: float) -> Tensor:
        """uint8: six counts in int64, 256 marks of scales, four sums a row in float64."""
        rows, blocks = coded.scales.shape
        out = torch.zeros(_SUMS_AT + 32 * rows, dtype=torch.uint8, device=self._device)
        self._launch(
            self._statistics, -(-rows // _ROWS_AT_ONCE), 32 * _ROWS_AT_ONCE,
            [weight, coded.codes, coded.scales, self._scale_values, out[_SUMS_AT:], out,
             out[_USED_AT:], rows, blocks, factor],
        )  # fmt: skip
        return out

    def _row(self, layout: RowLayout, matrices: list[_Coded]) -> Tensor:
        """uint8 [row_bytes], as `encode_row` writes it."""
        row = torch.zeros(layout.row_bytes, dtype=torch.uint8, device=self._device)
        for section, coded in zip(row_sections(layout), matrices, strict=True):
            rows, cols = coded.codes.shape
            self._launch(
                self._tiles, (rows // TILE) * (cols // TILE), 128,
                [coded.codes, coded.scales, row, cols // TILE, *section],
            )  # fmt: skip
        return row

    def _launch(
        self, kernel: Kernel, grid: int, threads: int, arguments: list[Tensor | int | float]
    ) -> None:
        stream = torch.cuda.current_stream(self._device).cuda_stream
        kernel.launch((grid, 1), threads, stream, arguments)


def row_sections(layout: RowLayout) -> list[tuple[int, ...]]:
    """What the kernel `tiles` takes from `run` on, for gate, up and down."""
    shared = layout.slice_width // TILE
    words, halves = layout.tile_code_bytes // 4, layout.tile_scale_bytes // TILE
    return [
        (shared, down, of, which, layout.slice_bytes, codes_at, scales_at, words, halves)
        for down, of, which, codes_at, scales_at in (
            (0, 2, 0, 0, layout.gate_up_scales),
            (0, 2, 1, 0, layout.gate_up_scales),
            (1, 1, 0, layout.down_codes, layout.down_scales),
        )
    ]


def measured_statistics(raw: U8, count: int, factor: float) -> MatrixStatistics:
    """raw: what the kernel `statistics` wrote for a matrix of `count` weights."""
    used = (E4M3_VALUES * factor)[np.flatnonzero(raw[_USED_AT:_SUMS_AT])]
    sums = raw[_SUMS_AT:].view(np.float64).reshape(-1, 4)
    return from_sums(count, raw[:_USED_AT].view(np.int64), sums, used[used > 0])
