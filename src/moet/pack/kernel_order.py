"""FP4 as a checkpoint stores it → a row, without unpacking: whole words and scale bytes move.

The four bytes that hold the codes of k = 8t … 8t + 7 of a row are a word of the layout as they are
(`formats.layout`), so the way into kernel order is a permutation, and so exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from moet.formats.layout import TILE, RowLayout
from moet.pack.files import U8


@dataclass(frozen=True)
class PackedMatrix:
    """One FP4 matrix in natural order, as stored.

    codes: uint32 [N, K / 8], eight E2M1 nibbles each, lowest k lowest.
    scales: uint8 [N, K / block].
    """

    codes: NDArray[np.uint32]
    scales: U8


def encode_packed_row(
    layout: RowLayout,
    first: int,
    gate: PackedMatrix,
    up: PackedMatrix,
    down: PackedMatrix,
    out: U8,
) -> None:
    """Writes slices `first` … of a whole expert into `out`, uint8 [row_bytes], padding included.

    layout: of the slices that are written (`RowLayout.local`). The bytes are those of `encode_row`
    on the unpacked codes.
    """
    out[layout.payload_bytes :] = 0
    width, block = layout.slice_width, layout.precision.block
    wide, tall = width // TILE, layout.hidden // TILE
    for index in range(layout.slices):
        start = (first + index) * width
        rows = slice(start, start + width)
        words = slice(start // 8, (start + width) // 8)
        cols = slice(start // block, (start + width) // block)
        raw = out[index * layout.slice_bytes : (index + 1) * layout.slice_bytes]
        gate_up = raw[: layout.gate_up_scales].view(np.uint32).reshape(wide, tall, 2, -1)
        gate_up_scales = raw[layout.gate_up_scales : layout.down_codes].reshape(wide, tall, 2, -1)
        for which, matrix in enumerate((gate, up)):
            _to_tiles(matrix.codes[rows], gate_up[:, :, which])
            _to_tiles(matrix.scales[rows], gate_up_scales[:, :, which])
        down_codes = raw[layout.down_codes : layout.down_scales].view(np.uint32)
        _to_tiles(down.codes[:, words], down_codes.reshape(tall, wide, -1))
        _to_tiles(down.scales[:, cols], raw[layout.down_scales :].reshape(tall, wide, -1))


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _to_tiles(source: NDArray[Any], tiles: NDArray[Any]) -> None:
    """source: [32 · groups, n · blocks]; tiles: [groups, blocks, 32 n], each [n][g][h][c]."""
    per_row = tiles.shape[2] // TILE
    for group in range(tiles.shape[0]):
        for block in range(tiles.shape[1]):
            tile = tiles[group, block]
            for n in range(per_row):
                column = source[group * TILE : (group + 1) * TILE, block * per_row + n]
                for g in range(8):
                    for hc in range(4):  # row 16 h + 8 c + g; unsigned, so that no index wraps
                        tile[np.uint64(n * TILE + g * 4 + hc)] = column[np.uint64(hc * 8 + g)]
