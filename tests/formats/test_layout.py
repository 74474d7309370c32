"""Rows: encode and decode are inverse, and every bit is where the layout's definition puts it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moet.errors import UnsupportedError
from moet.formats import Matrix, Precision, RowLayout, decode_row, encode_row, max_slices

SHAPES = [(32, 32, 1), (64, 96, 1), (96, 64, 2), (32, 256, 8), (128, 128, 4)]


def _matrix(rng: np.random.Generator, precision: Precision, rows: int, k: int) -> Matrix:
    codes = rng.integers(0, 1 << precision.code_bits, (rows, k), dtype=np.uint8)
    scales = rng.integers(0, 256, (rows, k // precision.block), dtype=np.uint8)
    return Matrix(codes, scales)


def _expert(layout: RowLayout, seed: int) -> tuple[Matrix, Matrix, Matrix]:
    rng = np.random.default_rng(seed)
    hidden, inter = layout.hidden, layout.intermediate
    shapes = ((inter, hidden), (inter, hidden), (hidden, inter))
    gate, up, down = (_matrix(rng, layout.precision, *shape) for shape in shapes)
    return gate, up, down


def _encoded(layout: RowLayout, expert: tuple[Matrix, Matrix, Matrix]) -> np.ndarray:
    row = np.full(layout.row_bytes, 0xAA, np.uint8)
    encode_row(layout, *expert, row)
    return row


@pytest.mark.parametrize("precision", Precision)
@settings(max_examples=15, deadline=None)
@given(
    tall=st.integers(1, 4), wide=st.integers(1, 3), slices=st.sampled_from([1, 2, 4, 8]),
    seed=st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_rows_round_trip(
    precision: Precision, tall: int, wide: int, slices: int, seed: int
) -> None:
    layout = RowLayout(precision, 32 * tall, 32 * wide * slices, slices)
    expert = _expert(layout, seed)
    row = _encoded(layout, expert)
    assert not row[layout.payload_bytes :].any()
    for wanted, got in zip(expert, decode_row(layout, row), strict=True):
        assert np.array_equal(wanted.codes, got.codes)
        assert np.array_equal(wanted.scales, got.scales)


def _code_bits(precision: Precision, row: int, k: int) -> list[int]:
    """Bit positions, from the tile's first byte, of a code's bits, most significant first."""
    h, c, g = row // 16, row // 8 % 2, row % 8
    t, j = k // 8, k % 8
    if precision is Precision.BASE:
        word = t * 16 + g * 2 + h
        i = 2 * (j // 2) + c
        sign = (15 if j % 2 == 0 else 31) - 2 * i
        return [32 * word + sign, 32 * word + (sign - 3) % 32]
    word = t * 32 + g * 4 + h * 2 + c
    return [32 * word + 4 * j + bit for bit in (3, 2, 1, 0)]


@pytest.mark.parametrize("precision", Precision)
@pytest.mark.parametrize(("hidden", "inter", "slices"), SHAPES)
def test_every_bit_is_where_the_definition_puts_it(
    precision: Precision, hidden: int, inter: int, slices: int
) -> None:
    layout = RowLayout(precision, hidden, inter, slices)
    gate, up, down = _expert(layout, 7)
    row = _encoded(layout, (gate, up, down))
    bits = np.unpackbits(row, bitorder="little")
    width = inter // slices
    code_bytes = 1024 * precision.code_bits // 8
    scale_bytes = 1024 // precision.block
    tiles = (width // 32) * (hidden // 32)

    place = np.array(
        [[_code_bits(precision, n, k) for k in range(32)] for n in range(32)]
    )  # [32, 32, code bits]
    weights = 1 << np.arange(precision.code_bits)[::-1]

    def codes_at(byte: int) -> np.ndarray:
        return bits[8 * byte + place] @ weights

    def scales_at(byte: int) -> np.ndarray:
        """[32 rows, scales of a row of the tile]."""
        out = np.empty((32, 32 // precision.block), np.uint8)
        for n in range(32):
            h, c, g = n // 16, n // 8 % 2, n % 8
            for q in range(out.shape[1]):
                out[n, q] = row[byte + 32 * q + 4 * g + 2 * h + c]
        return out

    per_block = 32 // precision.block
    for s in range(slices):
        start = s * 3 * tiles * (code_bytes + scale_bytes)
        scale_start = start + 2 * tiles * code_bytes
        down_start = scale_start + 2 * tiles * scale_bytes
        down_scale_start = down_start + tiles * code_bytes
        for group in range(width // 32):
            for block in range(hidden // 32):
                for which, matrix in enumerate((gate, up)):
                    tile = (group * (hidden // 32) + block) * 2 + which
                    rows = slice(s * width + 32 * group, s * width + 32 * group + 32)
                    wanted = matrix.codes[rows, 32 * block : 32 * block + 32]
                    assert np.array_equal(codes_at(start + tile * code_bytes), wanted)
                    wanted = matrix.scales[rows, per_block * block : per_block * (block + 1)]
                    assert np.array_equal(scales_at(scale_start + tile * scale_bytes), wanted)
        for group in range(hidden // 32):
            for block in range(width // 32):
                tile = group * (width // 32) + block
                rows, k = slice(32 * group, 32 * group + 32), s * width + 32 * block
                wanted = down.codes[rows, k : k + 32]
                assert np.array_equal(codes_at(down_start + tile * code_bytes), wanted)
                first = k // precision.block
                wanted = down.scales[rows, first : first + per_block]
                assert np.array_equal(scales_at(down_scale_start + tile * scale_bytes), wanted)
    assert layout.payload_bytes == slices * 3 * tiles * (code_bytes + scale_bytes)


def test_fp4_words_are_the_checkpoints_own_bytes() -> None:
    layout = RowLayout(Precision.MXFP4, 32, 32, 1)
    gate, up, down = _expert(layout, 1)
    row = _encoded(layout, (gate, up, down))
    stored = gate.codes[:, 0::2] | gate.codes[:, 1::2] << 4  # [N, K/2], as checkpoints hold it
    for n in range(32):
        h, c, g = n // 16, n // 8 % 2, n % 8
        for t in range(4):
            at = 4 * (((t * 8 + g) * 2 + h) * 2 + c)
            assert np.array_equal(row[at : at + 4], stored[n, 4 * t : 4 * t + 4])


@pytest.mark.parametrize("precision", Precision)
@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
def test_a_rank_reads_a_run_of_slices(precision: Precision, tp_size: int) -> None:
    layout = RowLayout(precision, 64, 512, 8)
    gate, up, down = _expert(layout, 3)
    row = _encoded(layout, (gate, up, down))
    local = layout.local(tp_size)
    assert local.slice_bytes == layout.slice_bytes
    width, block = 512 // tp_size, precision.block
    for rank in range(tp_size):
        run = row[rank * local.payload_bytes : (rank + 1) * local.payload_bytes]
        got_gate, got_up, got_down = decode_row(local, run)
        rows = slice(rank * width, (rank + 1) * width)
        cols = slice(rank * width // block, (rank + 1) * width // block)
        for wanted, got in ((gate, got_gate), (up, got_up)):
            assert np.array_equal(got.codes, wanted.codes[rows])
            assert np.array_equal(got.scales, wanted.scales[rows])
        assert np.array_equal(got_down.codes, down.codes[:, rows])
        assert np.array_equal(got_down.scales, down.scales[:, cols])


def test_sizes() -> None:
    for precision, bits in (("base", 2.25), ("mxfp4", 4.25), ("nvfp4", 4.5)):
        layout = RowLayout(Precision(precision), 4096, 2048, 8)
        assert layout.payload_bytes * 8 == 3 * 4096 * 2048 * bits
        assert layout.row_bytes % 4096 == 0
        assert 0 <= layout.row_bytes - layout.payload_bytes < 4096


def test_impossible_geometries_are_refused() -> None:
    for hidden, inter, slices in ((48, 64, 1), (64, 48, 1), (64, 96, 2)):
        with pytest.raises(UnsupportedError, match=r"cannot be cut.*vLLM alone"):
            RowLayout(Precision.BASE, hidden, inter, slices)
    with pytest.raises(UnsupportedError, match=r"2 slices. The sizes that do: 1, 2."):
        RowLayout(Precision.BASE, 64, 128, 2).local(4)
    assert [max_slices(n) for n in (32, 64, 96, 128, 256, 768, 1536, 2048)] == [
        1, 2, 1, 4, 8, 8, 8, 8,
    ]  # fmt: skip
