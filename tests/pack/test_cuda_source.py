"""The arithmetic of `pack.cu`, run on the host, gives the bits of the CPU's own level 0.

That the GPU gives them too is tested where there is one (`tests/gpu/test_pack.py`).
"""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moet.checkpoints import Checkpoint
from moet.formats.base import FORMATS
from moet.formats.fp4 import fp4_matrix
from moet.formats.layout import Matrix, Precision, RowLayout, encode_row
from moet.formats.numbers import E4M3_VALUES
from moet.pack import write_pack
from moet.pack.cuda import measured_statistics, row_sections
from moet.quantize import DataFreeQuantizer
from moet.quantize.base import MatrixContext
from moet.quantize.statistics import matrix_statistics
from tests.fixtures.checkpoints import write_checkpoint
from tests.pack.host_cuda import HostEncoder, compiled

CONTEXT = MatrixContext(0, 0, "gate")


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    return compiled(tmp_path_factory.mktemp("host"))


def pointer(array):
    return ctypes.c_void_p(array.ctypes.data)


def random_weights(seed: int, rows: int, cols: int) -> np.ndarray:
    """Of many sizes, with zeros of both signs, blocks of zeros, blocks of one large weight among
    small ones, for which the least scales are best, and subnormal numbers."""
    rng = np.random.default_rng(seed)
    weight = rng.standard_normal((rows, cols))
    spiky = rng.random(rows) < 0.5
    others = rng.choice([-1, 1], (rows, 32)) / rng.uniform(2, 20, (rows, 1))
    others[:, 0] = 1
    weight[spiky, -32:] = others[spiky]
    weight *= 2.0 ** rng.integers(-12, 4, (rows, 1))
    if seed % 3 == 1:  # as an FP4 checkpoint has them
        weight = np.round(2 * weight) / 2
    weight[rng.random(weight.shape) < 0.1] = 0.0
    weight[rng.random(weight.shape) < 0.05] = -0.0
    weight[rng.random(rows) < 0.2, :32] = 0.0
    if seed % 5 == 2:
        weight *= 1e-41
    if seed % 5 == 3:
        weight *= 1e35
    return weight.astype(np.float32)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**20), rows=st.integers(1, 9), blocks=st.integers(1, 12))
def test_search_and_statistics(kernels, seed, rows, blocks):
    weight = random_weights(seed, rows, 32 * blocks)
    expected = DataFreeQuantizer().quantize(weight, CONTEXT)
    codes = np.full(weight.shape, 0xEE, np.uint8)
    scales = np.full((rows, blocks), 0xEE, np.uint8)
    factor = expected.factor
    kernels.host_search(
        pointer(weight), pointer(E4M3_VALUES), pointer(codes), pointer(scales), rows, blocks,
        ctypes.c_float(factor), ctypes.c_float(np.float32(1 / (2.5 * factor))),
    )  # fmt: skip
    np.testing.assert_array_equal(scales, expected.scales)
    np.testing.assert_array_equal(codes, expected.codes)

    out = np.zeros(48 + 256 + 32 * rows, np.uint8)
    kernels.host_statistics(
        pointer(weight), pointer(codes), pointer(scales), pointer(E4M3_VALUES), pointer(out[304:]),
        pointer(out), pointer(out[48:]), rows, blocks, ctypes.c_float(factor),
    )  # fmt: skip
    assert measured_statistics(out, weight.size, factor) == matrix_statistics(weight, expected)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**20), rows=st.integers(1, 9), blocks=st.integers(1, 12))
def test_mxfp4(kernels, seed, rows, blocks):
    weight = random_weights(seed, rows, 32 * blocks)
    parts = FORMATS["mxfp4"].encode(torch.from_numpy(weight), "least_error")
    expected, _ = fp4_matrix("mxfp4", parts)
    codes = np.full(weight.shape, 0xEE, np.uint8)
    scales = np.full((rows, blocks), 0xEE, np.uint8)
    kernels.host_encode_mxfp4(pointer(weight), pointer(codes), pointer(scales), rows * blocks)
    np.testing.assert_array_equal(scales, expected.scales)
    np.testing.assert_array_equal(codes, expected.codes)


@pytest.mark.parametrize("precision", list(Precision))
@pytest.mark.parametrize(("hidden", "intermediate", "slices"), [(96, 128, 4), (64, 96, 1)])
def test_tiles(kernels, precision, hidden, intermediate, slices):
    layout = RowLayout(precision, hidden, intermediate, slices)
    rng = np.random.default_rng(0)

    def matrix(rows, cols):
        codes = rng.integers(0, 2**precision.code_bits, (rows, cols), dtype=np.uint8)
        return Matrix(codes, rng.integers(0, 256, (rows, cols // precision.block), dtype=np.uint8))

    matrices = [matrix(intermediate, hidden), matrix(intermediate, hidden),
                matrix(hidden, intermediate)]  # fmt: skip
    expected = np.empty(layout.row_bytes, np.uint8)
    encode_row(layout, *matrices, expected)
    row = np.zeros(layout.row_bytes, np.uint8)
    for section, of in zip(row_sections(layout), matrices, strict=True):
        tiles_across = of.codes.shape[1] // 32
        kernels.host_tiles(
            pointer(of.codes), pointer(of.scales), pointer(row),
            of.codes.shape[0] // 32 * tiles_across, tiles_across, *section,
        )  # fmt: skip
    np.testing.assert_array_equal(row, expected)


@pytest.mark.parametrize("with_fp4", [False, True])
@pytest.mark.parametrize(
    ("family", "format"),
    [("deepseek_v3", "bf16"), ("deepseek_v3", "fp8_block"), ("deepseek_v3", "nvfp4"),
     ("kimi_k2", "int4_group"), ("deepseek_v4", "mxfp4"), ("gpt_oss", "mxfp4")],
)  # fmt: skip
def test_whole_packs(kernels, family, format, with_fp4, tmp_path, monkeypatch):
    model = write_checkpoint(tmp_path / "model", family, format, layers=2, experts=2, top_k=1)
    encoder = HostEncoder(kernels, monkeypatch)
    with Checkpoint.open(model) as checkpoint:
        geometry = checkpoint.geometry
        digests = {
            write_pack(
                checkpoint, tmp_path / name, quantizer=DataFreeQuantizer(), with_fp4=with_fp4,
                encoder=by,
            ).digest
            for name, by in (("cpu", None), ("gpu", encoder))
        }  # fmt: skip
    assert len(digests) == 1
    assert encoder.encoded == geometry.num_experts * len(geometry.moe_layers)
