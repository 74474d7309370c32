"""Vector operations as LLVM IR: what differs between instruction sets, and nothing else.

A vector is 16 lanes of 32 bits. The kernels need two operations that no compiler finds by itself:
a table lookup in every byte, and a dot product of four bytes in every lane. Each class below gives
the same bits; they differ in speed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce

from llvmlite import ir
from numba.core import cgutils

LANES = 16
I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F32 = ir.FloatType()
INTS = ir.VectorType(I32, LANES)
FLOATS = ir.VectorType(F32, LANES)
BYTES = ir.VectorType(I8, 4 * LANES)


@dataclass(frozen=True)
class Codebook:
    """Code → unsigned byte: the weight's value (FP4: twice it) plus `offset`.

    The offset makes every value non-negative, as the byte dot product of x86 wants its first
    operand; what it adds to a dot product is offset · Σ activations, the same for all rows.
    """

    bits: int
    offset: int
    values: tuple[int, ...]


BASE = Codebook(2, 4, tuple(4 + v for v in (1, 4, -1, -4)))
_E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12)
E2M1 = Codebook(4, 12, tuple(12 + v for v in _E2M1_DOUBLED) + tuple(12 - v for v in _E2M1_DOUBLED))


class Vectors:
    """Operations on vectors in plain LLVM IR, for any processor."""

    name = "portable"
    features: tuple[str, ...] = ()

    def __init__(self, builder: ir.IRBuilder) -> None:
        self.ir = builder

    def call(self, name: str, returns: ir.Type, *args: ir.Value) -> ir.Value:
        """Calls an LLVM intrinsic."""
        kind = ir.FunctionType(returns, [a.type for a in args])
        return self.ir.call(cgutils.get_or_insert_function(self.ir.module, kind, name), args)

    def at(self, address: ir.Value, offset: int) -> ir.Value:
        """address + offset, int64."""
        return self.ir.add(address, ir.Constant(I64, offset)) if offset else address

    def load(self, address: ir.Value, kind: ir.Type, align: int = 1) -> ir.Value:
        return self.ir.load(self.ir.inttoptr(address, kind.as_pointer()), align=align)

    def store(self, value: ir.Value, address: ir.Value, align: int = 4) -> None:
        self.ir.store(value, self.ir.inttoptr(address, value.type.as_pointer()), align=align)

    def prefetch(self, address: ir.Value, level: int) -> None:
        """Asks for the line at `address`, which need not be mapped, in cache `level` (1 to 3)."""
        pointer = self.ir.inttoptr(address, I8.as_pointer())
        read, keep, data = (ir.Constant(I32, k) for k in (0, 4 - level, 1))
        self.call("llvm.prefetch.p0", ir.VoidType(), pointer, read, keep, data)

    def splat(self, value: int, kind: ir.VectorType = INTS) -> ir.Constant:
        return ir.Constant(kind, [value] * kind.count)

    def broadcast(self, scalar: ir.Value) -> ir.Value:
        kind = ir.VectorType(scalar.type, LANES)
        first = self.ir.insert_element(ir.Constant(kind, ir.Undefined), scalar, ir.Constant(I32, 0))
        return self.ir.shuffle_vector(first, first, self.splat(0))

    def rotate_left(self, value: ir.Value, count: int) -> ir.Value:
        return self.call("llvm.fshl.v16i32", INTS, value, value, self.splat(count))

    def fma(self, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
        """a · b + c rounded once; explicit, so that the compiler has no choice of rounding."""
        return self.call("llvm.fma.v16f32", FLOATS, a, b, c)

    def index(self, words: ir.Value, shift: int, bits: int) -> ir.Value:
        """In every byte, its `bits` bits from `shift` on."""
        if shift:
            words = self.ir.lshr(words, self.splat(shift))
        return self.ir.and_(words, self.splat(((1 << bits) - 1) * 0x01010101))

    def lookup(self, words: ir.Value, shift: int, book: Codebook) -> ir.Value:
        """In every byte of `words`, the book's value of the code at bits [shift, shift + bits)."""
        index = self.index(words, shift, book.bits)
        bits = [
            self.ir.and_(self.ir.lshr(index, self.splat(k)), self.splat(0x01010101))
            for k in range(book.bits)
        ]
        # The table as a polynomial in the code's bits. Sums of whole words are exact whatever
        # borrows pass between bytes, because every byte ends between 0 and 255.
        total: ir.Value = self.splat(book.values[0] * 0x01010101)
        for subset, factor in enumerate(_moebius(book.values)):
            if subset and factor:
                product = reduce(self.ir.and_, [b for k, b in enumerate(bits) if subset >> k & 1])
                total = self.ir.add(total, self.ir.mul(product, self.splat(factor)))
        return total

    def dot4(self, total: ir.Value, weights: ir.Value, digits: ir.Value) -> ir.Value:
        """total + Σ over the four bytes of a lane of unsigned weight · signed digit, int32."""
        for byte in range(4):
            weight = self.ir.and_(self.ir.lshr(weights, self.splat(8 * byte)), self.splat(0xFF))
            digit = self.ir.ashr(self.ir.shl(digits, self.splat(24 - 8 * byte)), self.splat(24))
            total = self.ir.add(total, self.ir.mul(weight, digit))
        return total


class Avx2(Vectors):
    """256-bit x86, in two halves."""

    name = "avx2"
    features = ("avx2", "fma", "f16c")

    _half_bytes = ir.VectorType(I8, 32)
    _half_ints = ir.VectorType(I32, 8)

    def _halves(self, value: ir.Value, kind: ir.Type) -> list[ir.Value]:
        picks = [ir.Constant(self._half_ints, list(range(k, k + 8))) for k in (0, 8)]
        return [self.ir.bitcast(self.ir.shuffle_vector(value, value, p), kind) for p in picks]

    def _join(self, halves: Iterable[ir.Value]) -> ir.Value:
        low, high = (self.ir.bitcast(h, self._half_ints) for h in halves)
        return self.ir.shuffle_vector(low, high, ir.Constant(INTS, list(range(16))))

    def lookup(self, words: ir.Value, shift: int, book: Codebook) -> ir.Value:
        table = ir.Constant(
            self._half_bytes, [book.values[i % len(book.values)] for i in range(32)]
        )
        return self._join(
            self.call("llvm.x86.avx2.pshuf.b", self._half_bytes, table, index)
            for index in self._halves(self.index(words, shift, book.bits), self._half_bytes)
        )

    def dot4(self, total: ir.Value, weights: ir.Value, digits: ir.Value) -> ir.Value:
        # Sums of two products stay below 2 · 24 · 128, far from the saturation of pmaddubsw.
        pairs = ir.VectorType(I16, 16)
        ones = self.splat(1, pairs)
        halves = zip(
            self._halves(weights, self._half_bytes),
            self._halves(digits, self._half_bytes),
            strict=True,
        )
        sums = self._join(
            self.call(
                "llvm.x86.avx2.pmadd.wd",
                self._half_ints,
                self.call("llvm.x86.avx2.pmadd.ub.sw", pairs, w, d),
                ones,
            )
            for w, d in halves
        )
        return self.ir.add(total, sums)


class Avx512(Vectors):
    """512-bit x86 with VBMI and VNNI: Ice Lake, Sapphire Rapids, Zen 4 and later."""

    name = "avx512"
    features = ("avx512f", "avx512bw", "avx512vbmi", "avx512vnni")

    def lookup(self, words: ir.Value, shift: int, book: Codebook) -> ir.Value:
        # vpermb indexes 64 bytes by the low six bits of a byte. A table that repeats over the bits
        # around the code reads it where it is: no mask, and a shift only past the sixth bit.
        if shift + book.bits > 6:
            words, shift = self.ir.lshr(words, self.splat(shift)), 0
        mask = len(book.values) - 1
        table = ir.Constant(BYTES, [book.values[i >> shift & mask] for i in range(64)])
        index = self.ir.bitcast(words, BYTES)
        found = self.call("llvm.x86.avx512.permvar.qi.512", BYTES, table, index)
        return self.ir.bitcast(found, INTS)

    def dot4(self, total: ir.Value, weights: ir.Value, digits: ir.Value) -> ir.Value:
        return self.call("llvm.x86.avx512.vpdpbusd.512", INTS, total, weights, digits)


INSTRUCTION_SETS: tuple[type[Vectors], ...] = (Avx512, Avx2, Vectors)


def best(features: str) -> type[Vectors]:
    """The fastest class for LLVM's feature string of a processor ("+avx2,-avx512f,…")."""
    have = {f[1:] for f in features.split(",") if f.startswith("+")}
    return next(v for v in INSTRUCTION_SETS if have.issuperset(v.features))


def _moebius(values: tuple[int, ...]) -> list[int]:
    """Coefficients c with values[i] = Σ over subsets s of i's bits of c[s]."""
    factors = list(values)
    step = 1
    while step < len(factors):
        for i in range(len(factors)):
            if i & step:
                factors[i] -= factors[i - step]
        step *= 2
    return factors
