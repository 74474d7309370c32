"""The inner loop: tiles of a row times the activations of one, two or three tokens.

The product of 32 codes with 32 activations is computed in integers and is exact: codes become
bytes (`simd.Codebook`), an activation is a 24-bit number in three signed bytes (`activations`).
Only then comes floating point: sum += (float32(integer) · step) · scale, one fused operation a
block of scales, blocks in ascending order. Nothing in it depends on how many tokens share a tile,
which is what makes a token's bits independent of its neighbours.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from moet.formats.layout import TILE, Precision
from moet.kernels.cpu.activations import DIGITS, RECORD_BYTES, STEP_AT, SUMS_AT
from moet.kernels.cpu.simd import (
    BASE,
    E2M1,
    F32,
    FLOATS,
    I8,
    I16,
    I32,
    I64,
    INTS,
    LANES,
    Vectors,
    best,
)

# Three tokens keep 18 sums in registers; four would spill.
TOKEN_GROUPS = (1, 2, 3)
PRECISIONS = (Precision.BASE, Precision.MXFP4, Precision.NVFP4)  # by the number that stages use
# How far ahead of the codes lines are asked for, and into which cache: soon needed ones into the
# first; far ones into the second, which can wait for more of them at once.
PREFETCH = ((2048, 1), (8192, 2))

_HALF = ir.VectorType(ir.HalfType(), LANES)
_SHORTS = ir.VectorType(I16, LANES)
_ACC_BYTES = TILE * 4


class _Tile:
    """Emits one tile. The accumulators of a token are two vectors, in `natural_rows` order."""

    def __init__(self, vectors: Vectors, precision: Precision) -> None:
        self.v = vectors
        self.precision = precision
        self.code_bytes = TILE * TILE * precision.code_bits // 8
        self.scale_bytes = TILE * TILE // precision.block
        self.book = BASE if precision is Precision.BASE else E2M1

    def prefetch(self, codes: ir.Value, scales: ir.Value) -> None:
        for ahead, level in PREFETCH:
            for line in range(0, self.code_bytes, 64):
                self.v.prefetch(self.v.at(codes, ahead + line), level)
            scales_ahead = ahead * self.scale_bytes // self.code_bytes
            self.v.prefetch(self.v.at(scales, scales_ahead), level)

    def accumulate(
        self, codes: ir.Value, scales: ir.Value, records: list[ir.Value], acc: list[list[ir.Value]]
    ) -> None:
        """acc[token][vector] += tile · activations, in place."""
        block = self.precision.block
        for part in range(TILE // block):
            scale = self._scales(scales, part)
            sums = self._dots(codes, records, part)
            for token, record in enumerate(records):
                step = self.v.broadcast(self.v.load(self.v.at(record, STEP_AT), F32, 4))
                for vector in range(2):
                    dot = self.v.ir.sitofp(sums[token][vector], FLOATS)
                    acc[token][vector] = self.v.fma(
                        self.v.ir.fmul(dot, step), scale[vector], acc[token][vector]
                    )

    def _scales(self, scales: ir.Value, part: int) -> list[ir.Value]:
        v, b = self.v, self.v.ir
        if self.precision is Precision.BASE:
            both = v.load(scales, _SHORTS)  # a lane's two rows, c = 0 and 1, are neighbours
            low = b.and_(b.shl(both, v.splat(7, _SHORTS)), v.splat(0x7F80, _SHORTS))
            high = b.and_(b.lshr(both, v.splat(1, _SHORTS)), v.splat(0x7F80, _SHORTS))
            return [self._half(low), self._half(high)]
        raw = [
            v.load(v.at(scales, (2 * part + vector) * LANES), ir.VectorType(I8, LANES))
            for vector in range(2)
        ]
        if self.precision is Precision.NVFP4:
            return [self._half(b.shl(b.zext(r, _SHORTS), v.splat(7, _SHORTS))) for r in raw]
        return [self._e8m0(b.zext(r, INTS)) for r in raw]

    def _half(self, bits: ir.Value) -> ir.Value:
        """E4M3 · 2^-8: seven places up, its bits are a half-precision number, subnormals too."""
        return self.v.ir.fpext(self.v.ir.bitcast(bits, _HALF), FLOATS)

    def _e8m0(self, exponent: ir.Value) -> ir.Value:
        """2^(exponent − 127); exponent 0 is a float32 subnormal."""
        b = self.v.ir
        normal = b.shl(exponent, self.v.splat(23))
        zero = b.icmp_unsigned("==", exponent, self.v.splat(0))
        return b.bitcast(b.select(zero, self.v.splat(1 << 22), normal), FLOATS)

    def _dots(self, codes: ir.Value, records: list[ir.Value], part: int) -> list[list[ir.Value]]:
        """int32 sums [token][vector] of one part: value · activation, codebook offset removed."""
        v = self.v
        sums = [[self._start(record, part) for _ in range(2)] for record in records]
        wide = TILE // self.precision.block
        for t in range(4 * part // wide, 4 * (part + 1) // wide):
            for vector, half, weights in self._weights(codes, t):
                for token, record in enumerate(records):
                    for digit in range(DIGITS):
                        offset = digit * TILE + t * 8 + half * 4
                        four = v.broadcast(v.load(v.at(record, offset), I32, 4))
                        sums[token][vector][digit] = v.dot4(
                            sums[token][vector][digit], weights, four
                        )
        return [[self._join(digits) for digits in token] for token in sums]

    def _start(self, record: ir.Value, part: int) -> list[ir.Value]:
        """What the digits' sums start from: −offset · Σ activations in the lowest, else 0."""
        v = self.v
        first, second = (v.load(v.at(record, SUMS_AT + 4 * k), I32, 4) for k in range(2))
        if self.precision.block == TILE:
            start = v.ir.add(first, second)
        else:
            start = second if part else first
        return [v.broadcast(start)] + [v.splat(0)] * (DIGITS - 1)

    def _join(self, digits: list[ir.Value]) -> ir.Value:
        total = digits[-1]
        for lower in reversed(digits[:-1]):
            total = self.v.ir.add(self.v.ir.shl(total, self.v.splat(8)), lower)
        return total

    def _weights(self, codes: ir.Value, t: int) -> list[tuple[int, int, ir.Value]]:
        """(accumulator, half of the digits, byte weights) for the 8 inputs at k = 8t."""
        v, b = self.v, self.v.ir
        if self.precision is Precision.BASE:
            # Signs lie at odd bits, magnitudes at even ones, three below their sign: two places
            # to the left a magnitude is beside its sign, and a byte holds four codes.
            words = v.load(v.at(codes, t * 64), INTS)
            words = b.or_(
                b.and_(words, v.splat(0xAAAAAAAA)),
                b.and_(v.rotate_left(words, 2), v.splat(0x55555555)),
            )
            return [(1 - (n & 1), n >> 1, v.lookup(words, 2 * n, self.book)) for n in range(4)]
        return [
            (vector, half, v.lookup(words, 4 * half, self.book))
            for vector in range(2)
            for words in [v.load(v.at(codes, t * 128 + vector * 64), INTS)]
            for half in range(2)
        ]


def make_strip(precision: Precision, tokens: int, vectors: type[Vectors] | None = None) -> Any:
    """The compiled loop over a run of tiles, for use inside numba functions.

    It is called as strip(codes, scales, blocks, matrices, records, acc), all int64: addresses of
    the tiles' codes and scales; k blocks in the run; matrices that alternate in it (2 for gate and
    up, 1 for down); address of `tokens` int64 addresses of the tokens' first activation record;
    address of float32 acc [matrices, tokens, 32], to which it adds.

    Args:
        vectors: the instruction set; by default the best one of the processor compiled for.
    """

    @intrinsic  # type: ignore[untyped-decorator]
    def strip(
        typing: Any, codes: Any, scales: Any, blocks: Any, matrices: Any, records: Any, acc: Any
    ) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            kind = vectors or best(context.codegen().magic_tuple()[2])
            _emit_loop(_Tile(kind(builder), precision), tokens, *args)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), codegen

    return strip


def _emit_loop(
    tile: _Tile,
    tokens: int,
    codes: ir.Value,
    scales: ir.Value,
    blocks: ir.Value,
    matrices: ir.Value,
    records: ir.Value,
    acc: ir.Value,
) -> None:
    v, b = tile.v, tile.v.ir
    zero, one = ir.Constant(I64, 0), ir.Constant(I64, 1)
    first = [v.load(v.at(records, 8 * i), I64, 8) for i in range(tokens)]
    total = b.mul(blocks, matrices)
    entry, body, done = b.block, b.append_basic_block("tile"), b.append_basic_block("done")
    b.cbranch(b.icmp_signed(">", total, zero), body, done)

    b.position_at_end(body)
    count, matrix, record, code, scale = (b.phi(I64) for _ in range(5))
    here = b.add(acc, b.mul(matrix, ir.Constant(I64, tokens * _ACC_BYTES)))
    places = [[v.at(here, i * _ACC_BYTES + k * 64) for k in range(2)] for i in range(tokens)]
    sums = [[v.load(p, FLOATS, 4) for p in token] for token in places]
    tile.prefetch(code, scale)
    tile.accumulate(code, scale, [b.add(r, record) for r in first], sums)
    for token, place in zip(sums, places, strict=True):
        for value, p in zip(token, place, strict=True):
            v.store(value, p)
    following = b.add(matrix, one)
    last = b.icmp_signed("==", following, matrices)
    steps = (
        (count, zero, b.add(count, one)),
        (matrix, zero, b.select(last, zero, following)),
        (record, zero, b.select(last, v.at(record, RECORD_BYTES), record)),
        (code, codes, v.at(code, tile.code_bytes)),
        (scale, scales, v.at(scale, tile.scale_bytes)),
    )
    for phi, start, then in steps:
        phi.add_incoming(start, entry)
        phi.add_incoming(then, b.block)
    b.cbranch(b.icmp_signed("<", steps[0][2], total), body, done)
    b.position_at_end(done)


def natural_rows(precision: Precision) -> list[int]:
    """Row of the tile that each of the 32 places of an accumulator holds."""
    if precision is Precision.BASE:  # [c][g][h]
        return [16 * h + 8 * c + g for c in range(2) for g in range(8) for h in range(2)]
    return [16 * h + 8 * c + g for g in range(8) for h in range(2) for c in range(2)]
