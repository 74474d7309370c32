"""Every CPU operator computes what the contract says, on rows as a pack would hold them."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moet.errors import ConfigError
from moet.formats.layout import Precision
from moet.kernels import OPERATORS, SwiGLU, make_operator
from tests.kernels.rows import make_experts, routing

NAMES = ("reference", "cpu")
PRECISIONS = list(Precision)


def error(out: torch.Tensor, exact: torch.Tensor) -> float:
    """Largest over tokens of |out − exact| / |exact|, 0 where both are 0."""
    norms = (out.double() - exact).norm(dim=1), exact.norm(dim=1)
    return float((norms[0] / norms[1].clamp(min=1e-30)).max()) if len(out) else 0.0


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25, deadline=None)
@given(
    precisions=st.lists(st.sampled_from(PRECISIONS), min_size=1, max_size=5),
    hidden=st.integers(1, 5).map(lambda n: 32 * n),
    width=st.integers(1, 3).map(lambda n: 32 * n),
    slices=st.sampled_from((1, 2, 3)),
    tokens=st.integers(0, 9),
    activation=st.sampled_from((SwiGLU(), SwiGLU(0.5), SwiGLU(0.7, 1.702, 1.0))),
    biased=st.booleans(),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
    seed=st.integers(0, 99),
)
def test_close_to_exact(
    name: str,
    precisions: list[Precision],
    hidden: int,
    width: int,
    slices: int,
    tokens: int,
    activation: SwiGLU,
    biased: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    experts = make_experts(
        precisions, hidden, width * slices, slices, seed, first=3, stride=2, biased=biased
    )
    known = experts.rows.experts.tolist()
    # Experts that are elsewhere, and the padding id.
    ids, weights = routing(tokens, [*known, -1, 0, 4, 1000], min(3, len(known)), seed)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, hidden, generator=generator).to(dtype)
    start = torch.randn(tokens, hidden, generator=generator)
    out = start.clone()
    make_operator(name).accumulate(x, ids, weights, experts.rows, activation, out)
    exact = start.double() + experts.exact(x, ids, weights, activation)
    assert error(out, exact) < 5e-6


@pytest.mark.parametrize("precision", PRECISIONS)
def test_cpu_agrees_with_reference_at_size(precision: Precision) -> None:
    experts = make_experts([precision] * 4, 1024, 512, 8)
    ids, weights = routing(7, range(4), 2)
    x = torch.randn(7, 1024, generator=torch.Generator().manual_seed(1))
    reference, fast = torch.zeros(7, 1024), torch.zeros(7, 1024)
    for name, out in (("reference", reference), ("cpu", fast)):
        make_operator(name).accumulate(x, ids, weights, experts.rows, SwiGLU(10.0), out)
    assert error(fast, reference.double()) < 3e-6
    assert (fast - reference).abs().max() < 1e-5 * reference.square().mean().sqrt()


@pytest.mark.parametrize("name", NAMES)
def test_clamp_is_applied_before_the_product(name: str) -> None:
    experts = make_experts([Precision.BASE] * 2, 64, 64)
    ids, weights = routing(3, range(2), 2)
    x = 40 * torch.randn(3, 64, generator=torch.Generator().manual_seed(2))
    clamped = experts.exact(x, ids, weights, SwiGLU(1.0))
    assert error(clamped, experts.exact(x, ids, weights, SwiGLU())) > 0.1
    out = torch.zeros(3, 64)
    make_operator(name).accumulate(x, ids, weights, experts.rows, SwiGLU(1.0), out)
    assert error(out, clamped) < 5e-6


@pytest.mark.parametrize("name", NAMES)
def test_skipped_pairs_leave_out_alone(name: str) -> None:
    experts = make_experts([Precision.MXFP4], 32, 32, first=5)
    ids = torch.tensor([[-1, 4], [5, -1], [6, -1]], dtype=torch.int32)
    out = torch.zeros(3, 32)
    x = torch.full((3, 32), torch.nan)
    x[1] = 1.0
    make_operator(name).accumulate(x, ids, torch.ones(3, 2), experts.rows, SwiGLU(), out)
    assert not out[0].any()
    assert not out[2].any()
    assert out[1].isfinite().all()
    assert out[1].any()


@pytest.mark.parametrize("name", NAMES)
def test_nothing_to_do(name: str) -> None:
    experts = make_experts([Precision.BASE], 32, 32)
    operator = make_operator(name)
    nobody, none = torch.empty(0, 2, dtype=torch.int32), torch.empty(0, 32)
    operator.accumulate(none, nobody, torch.empty(0, 2), experts.rows, SwiGLU(), none.clone())
    out = torch.ones(2, 32)
    ids = torch.zeros(2, 1, dtype=torch.int32)
    operator.accumulate(out.clone(), ids, torch.ones(2, 1), experts.wave([]), SwiGLU(), out)
    assert (out == 1).all()


@pytest.mark.parametrize("name", NAMES)
def test_same_expert_twice_counts_twice(name: str) -> None:
    experts = make_experts([Precision.NVFP4], 64, 32)
    x = torch.randn(1, 64, generator=torch.Generator().manual_seed(3))
    twice, once = torch.zeros(1, 64), torch.zeros(1, 64)
    operator = make_operator(name)
    zero = torch.zeros(1, 2, dtype=torch.int32)
    operator.accumulate(x, zero, torch.ones(1, 2), experts.rows, SwiGLU(), twice)
    operator.accumulate(x, zero[:, :1], torch.ones(1, 1), experts.rows, SwiGLU(), once)
    assert torch.equal(twice, 2 * once)


def test_extreme_values() -> None:
    """Zeros, huge and tiny activations; a token that is not finite spoils itself only."""
    experts = make_experts(PRECISIONS, 96, 64, 2)
    x = torch.randn(6, 96, generator=torch.Generator().manual_seed(4))
    x[1], x[2], x[3] = 0, 1e15 * x[2], 1e-20 * x[3]
    x[4, 7], x[5, 50] = torch.inf, torch.nan
    ids = torch.arange(3, dtype=torch.int32).repeat(6, 1)
    weights = torch.ones(6, 3)
    out = torch.zeros(6, 96)
    make_operator("cpu").accumulate(x, ids, weights, experts.rows, SwiGLU(), out)
    exact = experts.exact(x, ids, weights, SwiGLU())
    assert not out[1].any()
    assert error(out[[0, 2]], exact[[0, 2]]) < 5e-6
    assert out[3].isfinite().all()
    assert out[4:].isnan().all()


def test_wrong_tensors_are_refused() -> None:
    """The compiled code trusts shapes, so the operator must not."""
    experts = make_experts([Precision.BASE], 64, 32)
    ids = torch.zeros(2, 1, dtype=torch.int32)
    good = (torch.zeros(2, 64), ids, torch.ones(2, 1), torch.zeros(2, 64))
    bad = {
        0: (torch.zeros(2, 32), torch.zeros(2, 64, dtype=torch.float16)),
        1: (ids.long(), ids[:1]),
        2: (torch.ones(2, 2), torch.ones(2, 1).double()),
        3: (torch.zeros(3, 64), torch.zeros(64, 2).T, torch.zeros(2, 64).bfloat16()),
    }
    for place, tensors in bad.items():
        for tensor in tensors:
            arguments = list(good)
            arguments[place] = tensor
            x, topk, weights, out = arguments
            with pytest.raises(TypeError):
                make_operator("cpu").accumulate(x, topk, weights, experts.rows, SwiGLU(), out)


def test_strided_inputs() -> None:
    experts = make_experts([Precision.BASE] * 3, 64, 32)
    ids, weights = routing(4, range(3), 2)
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(5)).T
    wide = torch.cat([ids, ids], 1)[:, ::2], torch.cat([weights, weights], 1)[:, ::2]
    out, dense = torch.zeros(4, 64), torch.zeros(4, 64)
    operator = make_operator("cpu")
    operator.accumulate(x, wide[0], wide[1], experts.rows, SwiGLU(), out)
    operator.accumulate(
        x.contiguous(), *(t.contiguous() for t in wide), experts.rows, SwiGLU(), dense
    )
    assert torch.equal(out, dense)


def test_registry() -> None:
    assert {"reference", "cpu"} <= set(OPERATORS)
    assert all(make_operator(name).name == name for name in NAMES)
    with pytest.raises(ConfigError, match="reference"):
        make_operator("abacus")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_nothing_after_a_row_is_read(precision: Precision) -> None:
    """A row that ends at a page nobody may read: one byte too far would be a fault."""
    experts = make_experts([precision], 64, 32)
    payload = experts.rows.layouts[precision].payload_bytes
    size = -(-payload // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = np.frombuffer(mmap.mmap(-1, size + mmap.PAGESIZE), np.uint8)
    start = memory.ctypes.data
    protect = ctypes.CDLL(None).mprotect
    protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    assert protect(start + size, mmap.PAGESIZE, 0) == 0
    memory[size - payload : size] = experts.memory[0][:payload]
    rows = experts.wave([0])
    rows.address[0] = start + size - payload
    x = torch.randn(7, 64, generator=torch.Generator().manual_seed(6))
    ids, weights = torch.zeros(7, 1, dtype=torch.int32), torch.ones(7, 1)
    out, same = torch.zeros(7, 64), torch.zeros(7, 64)
    make_operator("cpu").accumulate(x, ids, weights, rows, SwiGLU(), out)
    make_operator("cpu").accumulate(x, ids, weights, experts.rows, SwiGLU(), same)
    assert torch.equal(out, same)
