"""Block formats decode exactly: every code with every scale, against exact rational arithmetic."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch

from moet.errors import ConfigError, UnsupportedError
from moet.formats import FORMATS, Precision, decode_matrix, fp4_matrix

E2M1 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)


def _packed(rows: int, k: int) -> tuple[torch.Tensor, np.ndarray]:
    """Codes 0..15 over and over in each row: packed, and one by one."""
    codes = np.tile(np.arange(16, dtype=np.uint8), (rows, k // 16))
    return torch.from_numpy(codes[:, 0::2] | codes[:, 1::2] << 4), codes


def _nearest_float32(exact: Fraction) -> np.float32:
    """Correct rounding, by trying the neighbours of a float32 that is close."""
    close = np.float32(float(exact))
    near = (
        np.nextafter(close, np.float32(-np.inf)),
        close,
        np.nextafter(close, np.float32(np.inf)),
    )
    return min(near, key=lambda x: (abs(Fraction(float(x)) - exact), x.view(np.uint32) & 1))


def test_mxfp4_decodes_every_code_with_every_scale() -> None:
    packed, codes = _packed(255, 32)
    scale = torch.arange(255, dtype=torch.uint8)[:, None]
    exact = E2M1[codes] * np.exp2(np.arange(255) - 127.0)[:, None]
    for stored in (scale, scale.view(torch.float8_e8m0fnu)):
        for form in (packed, packed.view(torch.int8)):
            parts = {"codes": form, "scale": stored}
            got = FORMATS["mxfp4"].decode(parts, torch.float64).numpy()
            assert np.array_equal(got, exact)
    # 2^127 · 2 is no float32 number any more; everything below is one, subnormals included.
    fits = {"codes": packed[:253], "scale": scale[:253]}
    got = FORMATS["mxfp4"].decode(fits).numpy()
    assert np.array_equal(got.astype(np.float64), exact[:253])
    assert np.array_equal(np.signbit(got), np.signbit(exact[:253]))


@pytest.mark.parametrize("factor", [1.0, 2.0**-12, 0.1, 3.0517578e-05, 1e-38, 7.25e30])
def test_nvfp4_decodes_every_code_with_every_scale(factor: float) -> None:
    packed, codes = _packed(127, 16)
    scale = torch.arange(127, dtype=torch.uint8)[:, None].view(torch.float8_e4m3fn)
    weight_scale_2 = torch.tensor(factor)
    parts = {"codes": packed, "scale": scale, "global_scale": weight_scale_2}
    wide = FORMATS["nvfp4"].decode(parts, torch.float64).numpy()
    single = FORMATS["nvfp4"].decode(parts).numpy()
    for n in range(127):
        for k in range(16):
            code, block, whole = E2M1[codes[n, k]], E4M3[n], weight_scale_2.item()
            exact = Fraction(code) * Fraction(block) * Fraction(whole)
            assert Fraction(float(wide[n, k])) == exact
            assert single[n, k] == _nearest_float32(exact)


def test_nvfp4_in_float32_is_exact_for_factors_of_18_bits() -> None:
    packed, _ = _packed(127, 16)
    scale = torch.arange(127, dtype=torch.uint8)[:, None].view(torch.float8_e4m3fn)
    factor = torch.tensor(float((2**18 - 1) * 2.0**-30))
    parts = {"codes": packed, "scale": scale, "global_scale": factor.reshape(1)}
    wide = FORMATS["nvfp4"].decode(parts, torch.float64)
    assert torch.equal(FORMATS["nvfp4"].decode(parts).double(), wide)


def test_fp8_block_decodes_every_code_and_ragged_edges() -> None:
    rng = np.random.default_rng(0)
    data = rng.integers(0, 0x7F, (300, 200), dtype=np.uint8)
    data |= rng.integers(0, 2, data.shape, dtype=np.uint8) << 7
    data[0, :127], data[1, :127] = np.arange(127), np.arange(127) + 128
    scale = torch.from_numpy(rng.lognormal(-6, 1, (3, 2)).astype(np.float32))
    parts = {"weight": torch.from_numpy(data).view(torch.float8_e4m3fn), "scale_inv": scale}
    exact = np.empty((300, 200))
    for n in range(300):
        for k in range(200):
            exact[n, k] = E4M3[data[n, k]] * float(scale[n // 128, k // 128])
    assert np.array_equal(FORMATS["fp8_block"].decode(parts, torch.float64).numpy(), exact)
    assert np.array_equal(FORMATS["fp8_block"].decode(parts).numpy(), exact.astype(np.float32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_int4_group_decodes_every_nibble_of_a_word(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(1)
    values = rng.integers(-8, 8, (5, 96)).astype(np.int8)
    values[0, :16] = np.arange(-8, 8)
    scale = torch.from_numpy(rng.lognormal(-4, 1, (5, 3)).astype(np.float32)).to(dtype)
    # pack-quantized: eight values a word, the first in the lowest bits, each plus 8.
    shifts = np.arange(8, dtype=np.uint32) * 4
    words = ((values + 8).astype(np.uint32).reshape(5, 12, 8) << shifts).sum(2, dtype=np.uint32)
    parts = {"codes": torch.from_numpy(words.view(np.int32)), "scale": scale}
    exact = values * scale.double().numpy().repeat(32, 1)
    assert np.array_equal(FORMATS["int4_group"].decode(parts, torch.float64).numpy(), exact)
    got = FORMATS["int4_group"].decode(parts).numpy()
    assert np.array_equal(got, exact.astype(np.float32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_bf16_returns_the_stored_numbers_in_memory_of_its_own(dtype: torch.dtype) -> None:
    stored = torch.randn(7, 9).to(dtype)
    weight = FORMATS["bf16"].decode({"weight": stored})
    assert torch.equal(weight, stored.float())
    weight.zero_()
    assert stored.any()


def test_fp4_matrix_keeps_every_stored_bit() -> None:
    packed, codes = _packed(127, 32)
    scale = torch.arange(254, dtype=torch.uint8).reshape(127, 2) % 127
    parts = {
        "codes": packed,
        "scale": scale.view(torch.float8_e4m3fn),
        "global_scale": torch.tensor(0.1),
    }
    matrix, factor = fp4_matrix("nvfp4", parts)
    assert np.array_equal(matrix.codes, codes)
    assert np.array_equal(matrix.scales, scale.numpy())
    assert np.float32(factor) == np.float32(0.1)
    decoded = decode_matrix(Precision.NVFP4, matrix, factor)
    assert np.array_equal(decoded, FORMATS["nvfp4"].decode(parts).numpy())

    parts = {"codes": packed, "scale": scale[:, :1].contiguous()}
    matrix, factor = fp4_matrix("mxfp4", parts)
    assert factor == 1.0
    assert np.array_equal(matrix.codes, codes)
    assert np.array_equal(matrix.scales, scale[:, :1].numpy())
    decoded = decode_matrix(Precision.MXFP4, matrix, factor)
    assert np.array_equal(decoded, FORMATS["mxfp4"].decode(parts).numpy())


def test_fp4_matrix_refuses_other_formats() -> None:
    with pytest.raises(UnsupportedError, match="fp8_block is not an FP4 format"):
        fp4_matrix("fp8_block", {})
    with pytest.raises(ConfigError, match="unknown block format 'fp5'"):
        fp4_matrix("fp5", {})


def test_bits_count_codes_and_scales_as_stored() -> None:
    weight = torch.randn(256, 256)
    for name, rule in (
        ("mxfp4", "ocp"),
        ("nvfp4", "amax"),
        ("fp8_block", "amax"),
        ("int4_group", "amax"),
        ("bf16", "nearest"),
    ):
        parts = FORMATS[name].encode(weight, rule)
        assert tuple(parts) == FORMATS[name].parts
        stored = sum(part.nbytes for part in parts.values() if part.ndim)  # not the one factor
        assert stored * 8 / weight.numel() == pytest.approx(FORMATS[name].bits)
