"""Batch invariance of the fast operator: the same bits whatever else is computed, and how."""

from __future__ import annotations

import itertools
import subprocess
import sys

import numpy as np
import pytest
import torch
from numba import njit

from moet.formats.layout import TILE, Precision
from moet.kernels import SwiGLU, make_operator
from moet.kernels.cpu import operator as cpu_operator
from moet.kernels.cpu import schedule
from moet.kernels.cpu.activations import RECORD_BYTES, to_record
from moet.kernels.cpu.simd import INSTRUCTION_SETS, Vectors, best
from moet.kernels.cpu.strip import make_strip
from tests.kernels.rows import Experts, make_experts, routing

MIX = [Precision.BASE, Precision.NVFP4, Precision.BASE, Precision.MXFP4, Precision.BASE]


@pytest.fixture(scope="module")
def experts() -> Experts:
    return make_experts(MIX * 2, 128, 192, 2, seed=1)


def run(experts: Experts, tokens: range, threads: int = 1) -> torch.Tensor:
    """Outputs of some of the 64 tokens that the tests share."""
    ids, weights = routing(64, range(len(experts.memory)), 3, seed=2)
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(3))
    pick = torch.tensor(list(tokens))
    out = torch.zeros(len(tokens), 128)
    make_operator("cpu", threads=threads).accumulate(
        x[pick], ids[pick], weights[pick], experts.rows, SwiGLU(7.0), out
    )
    return out


def test_a_token_alone_and_in_any_batch(experts: Experts) -> None:
    alone = torch.cat([run(experts, range(t, t + 1)) for t in range(64)])
    for size in (2, 3, 4, 5, 7, 16, 33, 64):
        assert torch.equal(run(experts, range(size)), alone[:size]), size
        assert torch.equal(run(experts, range(64 - size, 64)), alone[64 - size :]), size


def test_many_tokens_of_one_expert() -> None:
    """More than the stages hold at once, in groups of three and two."""
    experts = make_experts([Precision.BASE], 64, 64, 2)
    x = torch.randn(75, 64, generator=torch.Generator().manual_seed(4))
    ids, weights = torch.zeros(75, 1, dtype=torch.int32), torch.rand(75, 1)
    operator = make_operator("cpu")
    together, alone = torch.zeros(75, 64), torch.zeros(75, 64)
    operator.accumulate(x, ids, weights, experts.rows, SwiGLU(), together)
    for t in range(75):
        row = slice(t, t + 1)
        operator.accumulate(x[row], ids[row], weights[row], experts.rows, SwiGLU(), alone[row])
    assert torch.equal(together, alone)


def test_waves(experts: Experts) -> None:
    ids, weights = routing(64, range(len(experts.memory)), 3, seed=2)
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(3))
    whole = run(experts, range(64))
    operator = make_operator("cpu")
    for cuts in ((0, 1, 10), (0, 4, 5, 10), tuple(range(11))):
        out = torch.zeros(64, 128)
        for low, high in itertools.pairwise(cuts):
            wave = experts.wave(range(low, high))
            operator.accumulate(x, ids, weights, wave, SwiGLU(7.0), out)
        assert torch.equal(out, whole), cuts


def test_threads(experts: Experts) -> None:
    one = run(experts, range(64))
    for threads in (2, 3, 8):
        assert torch.equal(run(experts, range(64), threads), one), threads


def test_batches_of_pairs(experts: Experts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Little working memory: an expert's tokens fall into several batches."""
    whole = run(experts, range(64))
    pair_bytes = 192 // TILE * RECORD_BYTES
    for pairs in (1, 5, 17, 191):
        monkeypatch.setattr(cpu_operator, "_H_BYTES", pairs * pair_bytes)
        assert torch.equal(run(experts, range(64)), whole), pairs


def test_work_that_is_worth_a_team() -> None:
    """The other tests stay small; this work is done by a team where there is one."""
    experts = make_experts([Precision.BASE] * 4, 512, 512, 4)
    assert schedule._WORTH_A_TEAM < 48 * 512 * 512
    ids, weights = routing(24, range(4), 2)
    x = torch.randn(24, 512, generator=torch.Generator().manual_seed(5))
    outs = []
    for threads in (1, 2, 5):
        outs.append(torch.zeros(24, 512))
        operator = make_operator("cpu", threads=threads)
        operator.accumulate(x, ids, weights, experts.rows, SwiGLU(), outs[-1])
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


def test_where_rows_lie(experts: Experts) -> None:
    whole = run(experts, range(64))
    moved = Experts(experts.wave(range(10)), [m.copy() for m in experts.memory], experts.matrices)
    moved.rows.address[:] = [m.ctypes.data for m in moved.memory]
    assert torch.equal(run(moved, range(64)), whole)


def host() -> type[Vectors]:
    from numba.core.registry import cpu_target

    return best(cpu_target.target_context.codegen().magic_tuple()[2])


@pytest.mark.parametrize("precision", list(Precision))
def test_instruction_sets_agree(precision: Precision) -> None:
    """Portable IR, AVX2 and AVX-512 give the same bits, for one token and for two."""
    here = INSTRUCTION_SETS[INSTRUCTION_SETS.index(host()) :]
    rng = np.random.default_rng(6)
    blocks, code_bytes = 3, TILE * TILE * precision.code_bits // 8
    codes = rng.integers(0, 256, blocks * code_bytes, dtype=np.uint8)
    low, high = (100, 140) if precision is Precision.MXFP4 else (0, 0x7F)
    scales = rng.integers(low, high, blocks * TILE * TILE // precision.block, dtype=np.uint8)
    records = np.zeros((2, blocks, RECORD_BYTES), np.uint8)
    for token in range(2):
        for block in range(blocks):
            values = rng.standard_normal(TILE).astype(np.float32)
            record = records[token, block]
            to_record(values, int(precision is not Precision.BASE), record, record.view(np.int32))
    places = np.array([r.ctypes.data for r in records], np.int64)
    results = []
    for vectors in here:
        for tokens in (1, 2):
            strip = make_strip(precision, tokens, vectors)

            @njit
            def loop(a, b, n, m, r, s, strip=strip):  # type: ignore[no-untyped-def]
                strip(a, b, n, m, r, s)

            acc = np.zeros((1, tokens, TILE), np.float32)
            addresses = (codes.ctypes.data, scales.ctypes.data)
            loop(*addresses, blocks, 1, places.ctypes.data, acc.ctypes.data)
            results.append(acc[0, 0])
    assert np.abs(results[0]).max() > 0
    for result in results:
        assert np.array_equal(result.view(np.int32), results[0].view(np.int32))


def test_best_instruction_set() -> None:
    names = [v.name for v in INSTRUCTION_SETS]
    assert names == ["avx512", "avx2", "portable"]
    assert best("+sse4.2").name == "portable"
    assert best("+avx2,+fma,+f16c,-avx512f").name == "avx2"
    assert best("+avx2,+fma,+f16c,+avx512f,+avx512bw,-avx512vbmi,+avx512vnni").name == "avx2"


def test_second_process_reads_the_cache() -> None:
    """What one process compiled, the next one loads: no stage is compiled again."""
    make_operator("cpu").warm_up()  # type: ignore[attr-defined]
    code = (
        "from moet.kernels.cpu.compiled import c_functions\n"
        "print(*(function.cache_hits for function in c_functions()))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == ["1"] * 5
