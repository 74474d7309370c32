"""The bytes of one expert, in the order in which the kernels consume them.

A *row* is one expert of one layer at one precision. It is cut into `slices` along the expert's
intermediate dimension, so that rank r of t reads slices [r·S/t, (r+1)·S/t): one contiguous run.
A slice is a small expert of its own, `intermediate / slices` wide, in four sections:

    gate/up codes   [row group][k block][gate, up] tiles   rows = slice of intermediate, k = hidden
    gate/up scales  [row group][k block][gate, up] tiles
    down codes      [row group][k block] tiles             rows = hidden, k = slice of intermediate
    down scales     [row group][k block] tiles

A *tile* is 32 rows × 32 k. Within it (t in 0..3, g in 0..7, h and c in 0..1, j in 0..7) the weight
of row 16h + 8c + g and k = 8t + j lies where lane (g, t) of a tensor-core fragment wants it:

* 2 bits: uint32 word [t][g][h] holds both c and all j, 16 codes. The code (c, j) has its sign at
  bit p = 15 + 16·(j mod 2) − 2i with i = 2·(j div 2) + c, and its magnitude bit at p − 3 (mod 32).
  Turned left by 2i, a word thus has the codes of two pairs (j, j + 1) at bits 7/4, 15/12, 23/20 and
  31/28: masked and added to the scale byte, four E4M3 weights (sign, and + 0x10 for ×4).
* 4 bits: word [t][g][h][c] holds the 8 nibbles j, lowest first: the checkpoint's own bytes.
* scales: byte [g][h][c] (one scale per 32 k), or [q][g][h][c] with q = k div 16 (one per 16).

k runs in natural order, so a lane's activations are 8 consecutive values.
The float32 factor of each matrix (`t` of the base, `weight_scale_2` of NVFP4) is not in the row.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numba import njit
from numpy.typing import NDArray

from moet.errors import UnsupportedError

TILE = 32
ROW_ALIGN = 4096
MAX_SLICES = 8

U8 = NDArray[np.uint8]


class Precision(StrEnum):
    """How an expert's weights are stored: the 2-bit base, or FP4 of either kind."""

    BASE = "base"
    MXFP4 = "mxfp4"
    NVFP4 = "nvfp4"

    @property
    def code_bits(self) -> int:
        return 2 if self is Precision.BASE else 4

    @property
    def block(self) -> int:
        """Weights that share one scale byte."""
        return 16 if self is Precision.NVFP4 else 32


@dataclass(frozen=True)
class RowLayout:
    """Sizes and offsets, in bytes, of an expert's row of `slices` slices.

    `hidden` and `intermediate` are the expert's; `intermediate / slices` must be a multiple of 32.
    """

    precision: Precision
    hidden: int
    intermediate: int
    slices: int

    def __post_init__(self) -> None:
        if self.hidden % TILE or self.intermediate % (TILE * self.slices):
            raise UnsupportedError(
                f"an expert of {self.hidden} × {self.intermediate} cannot be cut into "
                f"{self.slices} slices of {TILE} × {TILE} tiles.",
                "moet has no kernels for such experts; vLLM alone may serve the model.",
            )

    @property
    def slice_width(self) -> int:
        """Intermediate features in one slice."""
        return self.intermediate // self.slices

    @property
    def tile_code_bytes(self) -> int:
        return TILE * TILE * self.precision.code_bits // 8

    @property
    def tile_scale_bytes(self) -> int:
        return TILE * TILE // self.precision.block

    @property
    def _tiles(self) -> int:
        """Tiles of one matrix in one slice."""
        return (self.slice_width // TILE) * (self.hidden // TILE)

    @property
    def gate_up_scales(self) -> int:
        """Offset of the gate/up scales in a slice (the codes are at 0)."""
        return 2 * self._tiles * self.tile_code_bytes

    @property
    def down_codes(self) -> int:
        """Offset of the down codes in a slice."""
        return self.gate_up_scales + 2 * self._tiles * self.tile_scale_bytes

    @property
    def down_scales(self) -> int:
        """Offset of the down scales in a slice."""
        return self.down_codes + self._tiles * self.tile_code_bytes

    @property
    def slice_bytes(self) -> int:
        return self.down_scales + self._tiles * self.tile_scale_bytes

    @property
    def payload_bytes(self) -> int:
        """All slices, without the padding."""
        return self.slices * self.slice_bytes

    @property
    def row_bytes(self) -> int:
        """The row as stored: padded to 4096 bytes."""
        return -(-self.payload_bytes // ROW_ALIGN) * ROW_ALIGN

    def local(self, tp_size: int) -> RowLayout:
        """The layout of one rank's run of slices.

        Raises UnsupportedError when the slices do not divide among `tp_size` ranks.
        """
        if self.slices % tp_size:
            fitting = [str(n) for n in range(1, self.slices + 1) if self.slices % n == 0]
            raise UnsupportedError(
                f"tensor parallelism {tp_size} does not divide this pack's {self.slices} slices.",
                f"The sizes that do: {', '.join(fitting)}.",
            )
        return RowLayout(
            self.precision, self.hidden, self.intermediate // tp_size, self.slices // tp_size
        )


def max_slices(intermediate: int) -> int:
    """The most slices, up to 8 and a power of two, that an intermediate dimension allows."""
    slices = MAX_SLICES
    while slices > 1 and intermediate % (TILE * slices):
        slices //= 2
    return slices


@dataclass(frozen=True)
class Matrix:
    """One quantized matrix in natural order.

    codes: uint8 [N, K], one code a byte: for the base sign << 1 | big, for FP4 the E2M1 nibble.
    scales: uint8 [N, K / block], E4M3 bytes (base, NVFP4) or E8M0 bytes (MXFP4).
    """

    codes: U8
    scales: U8


def encode_row(layout: RowLayout, gate: Matrix, up: Matrix, down: Matrix, out: U8) -> None:
    """Writes an expert's row into `out`, uint8 [row_bytes], padding included.

    gate and up are [intermediate, hidden], down is [hidden, intermediate].
    """
    width, block = layout.slice_width, layout.precision.block
    out[layout.payload_bytes :] = 0
    for index in range(layout.slices):
        view = _slice_view(layout, out, index)
        rows = slice(index * width, (index + 1) * width)
        cols = slice(index * width // block, (index + 1) * width // block)
        for which, matrix in enumerate((gate, up)):
            _encode(layout.precision, matrix.codes[rows], view.gate_up_codes[:, :, which])
            _encode_scales(matrix.scales[rows], view.gate_up_scales[:, :, which])
        _encode(layout.precision, down.codes[:, rows], view.down_codes)
        _encode_scales(down.scales[:, cols], view.down_scales)


def decode_row(layout: RowLayout, row: U8) -> tuple[Matrix, Matrix, Matrix]:
    """The inverse of `encode_row`: (gate, up, down) in natural order."""
    hidden, inter, block = layout.hidden, layout.intermediate, layout.precision.block
    gate, up = (
        Matrix(np.empty((inter, hidden), np.uint8), np.empty((inter, hidden // block), np.uint8))
        for _ in range(2)
    )
    down = Matrix(np.empty((hidden, inter), np.uint8), np.empty((hidden, inter // block), np.uint8))
    width = layout.slice_width
    for index in range(layout.slices):
        view = _slice_view(layout, row, index)
        rows = slice(index * width, (index + 1) * width)
        cols = slice(index * width // block, (index + 1) * width // block)
        for which, matrix in enumerate((gate, up)):
            _decode(layout.precision, view.gate_up_codes[:, :, which], matrix.codes[rows])
            _decode_scales(view.gate_up_scales[:, :, which], matrix.scales[rows])
        _decode(layout.precision, view.down_codes, down.codes[:, rows])
        _decode_scales(view.down_scales, down.scales[:, cols])
    return gate, up, down


@dataclass(frozen=True)
class _SliceView:
    """One slice of a row as arrays: codes uint32 [.., words], scales uint8 [.., bytes]."""

    gate_up_codes: NDArray[np.uint32]
    gate_up_scales: U8
    down_codes: NDArray[np.uint32]
    down_scales: U8


def _slice_view(layout: RowLayout, row: U8, index: int) -> _SliceView:
    start = index * layout.slice_bytes
    wide, tall = layout.slice_width // TILE, layout.hidden // TILE
    raw = row[start : start + layout.slice_bytes]
    return _SliceView(
        raw[: layout.gate_up_scales].view(np.uint32).reshape(wide, tall, 2, -1),
        raw[layout.gate_up_scales : layout.down_codes].reshape(wide, tall, 2, -1),
        raw[layout.down_codes : layout.down_scales].view(np.uint32).reshape(tall, wide, -1),
        raw[layout.down_scales : layout.slice_bytes].reshape(tall, wide, -1),
    )


def _encode(precision: Precision, codes: U8, words: NDArray[np.uint32]) -> None:
    (_encode_codes2 if precision is Precision.BASE else _encode_codes4)(codes, words)


def _decode(precision: Precision, words: NDArray[np.uint32], codes: U8) -> None:
    (_decode_codes2 if precision is Precision.BASE else _decode_codes4)(words, codes)


# The four loops below are compiled because a pack of a large model passes every weight through
# them; each is the layout's definition above, written out.


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _encode_codes2(codes: U8, words: NDArray[np.uint32]) -> None:
    for group in range(words.shape[0]):
        for block in range(words.shape[1]):
            for t in range(4):
                for g in range(8):
                    for h in range(2):
                        word = np.uint32(0)
                        for c in range(2):
                            row = group * 32 + h * 16 + c * 8 + g
                            for j in range(8):
                                code = codes[row, block * 32 + t * 8 + j]
                                p = 15 + 16 * (j & 1) - 2 * (2 * (j >> 1) + c)
                                word |= np.uint32(code >> 1) << np.uint32(p)
                                word |= np.uint32(code & 1) << np.uint32((p - 3) & 31)
                        words[group, block, (t * 8 + g) * 2 + h] = word


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _decode_codes2(words: NDArray[np.uint32], codes: U8) -> None:
    for group in range(words.shape[0]):
        for block in range(words.shape[1]):
            for t in range(4):
                for g in range(8):
                    for h in range(2):
                        word = words[group, block, (t * 8 + g) * 2 + h]
                        for c in range(2):
                            row = group * 32 + h * 16 + c * 8 + g
                            for j in range(8):
                                p = 15 + 16 * (j & 1) - 2 * (2 * (j >> 1) + c)
                                sign = (word >> np.uint32(p)) & np.uint32(1)
                                big = (word >> np.uint32((p - 3) & 31)) & np.uint32(1)
                                codes[row, block * 32 + t * 8 + j] = sign << np.uint32(1) | big


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _encode_codes4(codes: U8, words: NDArray[np.uint32]) -> None:
    for group in range(words.shape[0]):
        for block in range(words.shape[1]):
            for t in range(4):
                for row in range(32):
                    h, c, g = row >> 4, (row >> 3) & 1, row & 7
                    word = np.uint32(0)
                    for j in range(8):
                        code = codes[group * 32 + row, block * 32 + t * 8 + j]
                        word |= np.uint32(code) << np.uint32(4 * j)
                    words[group, block, ((t * 8 + g) * 2 + h) * 2 + c] = word


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _decode_codes4(words: NDArray[np.uint32], codes: U8) -> None:
    for group in range(words.shape[0]):
        for block in range(words.shape[1]):
            for t in range(4):
                for row in range(32):
                    h, c, g = row >> 4, (row >> 3) & 1, row & 7
                    word = words[group, block, ((t * 8 + g) * 2 + h) * 2 + c]
                    for j in range(8):
                        code = (word >> np.uint32(4 * j)) & np.uint32(15)
                        codes[group * 32 + row, block * 32 + t * 8 + j] = code


def _tile_scales(scales: U8, tiles: U8) -> U8:
    """`scales` [R, K / block] seen in tile order, shaped as [groups, blocks, q, g, h, c]."""
    groups, blocks = tiles.shape[:2]
    halves = tiles.shape[2] // TILE
    seen = scales.reshape(groups, 2, 2, 8, blocks, halves)  # group, h, c, g, block, q
    return seen.transpose(0, 4, 5, 3, 1, 2)


def _encode_scales(scales: U8, tiles: U8) -> None:
    order = _tile_scales(scales, tiles)
    tiles[:] = order.reshape(tiles.shape)


def _decode_scales(tiles: U8, scales: U8) -> None:
    groups, blocks = tiles.shape[:2]
    natural = tiles.reshape(groups, blocks, -1, 8, 2, 2).transpose(0, 4, 5, 3, 1, 2)
    scales[:] = natural.reshape(scales.shape)
