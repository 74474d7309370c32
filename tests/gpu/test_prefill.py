"""The prefill kernels against a float64 reference, and their promises: same bits run to run, under
graph replay, wherever rows lie, and whoever else is in the batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moet.formats.layout import Precision, RowLayout
from moet.kernels.base import SwiGLU
from moet.kernels.cuda.prefill import PrefillExperts
from moet.kernels.cuda.shape import REMOTE, ExpertsShape
from moet.kernels.cuda.target import Target
from tests.gpu.experts import Layer, random_routing, relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

BOUND = 4e-3
FP8_BOUND = 6e-2  # E4M3 keeps four significant bits of x and of h
EXPERTS, TOP_K, MAX_TOKENS = 16, 4, 512
MIXTURE = ["base", "mxfp4", "nvfp4"]
# k blocks in odd numbers, row groups that do not fill a block, slices of three k blocks; and
# Qwen3-30B-A3B's proportions.
SHAPES = [(544, 288, 3), (1024, 768, 8)]


def layer(shape: tuple[int, int, int], kinds: list[str]) -> Layer:
    layouts = {Precision(k): RowLayout(Precision(k), *shape) for k in kinds}
    return Layer.random(layouts, [Precision(kinds[e % len(kinds)]) for e in range(EXPERTS)], 1)


def prefill(
    tested: Layer, out_dtype: torch.dtype = torch.float32, fp8: bool = False
) -> PrefillExperts:
    shape = ExpertsShape.of(tested.layouts, EXPERTS, TOP_K)
    return PrefillExperts(shape, torch.device("cuda"), out_dtype, fp8, MAX_TOKENS)


def run(tested: Layer, operator: PrefillExperts, x: Tensor, ids: Tensor, weights: Tensor,
        limit: float | None = None, address: Tensor | None = None, out: Tensor | None = None,
        accumulate: bool = False) -> Tensor:  # fmt: skip
    if out is None:
        out = torch.full(x.shape, float("nan"), dtype=operator.out_dtype, device="cuda")
    operator.forward(
        x, ids, weights, tested.address if address is None else address, tested.precision,
        tested.factor, SwiGLU(limit), out, accumulate,
    )  # fmt: skip
    return out


def batch(tokens: int, hidden: int) -> tuple[Tensor, Tensor, Tensor]:
    ids, weights = random_routing(tokens, EXPERTS, TOP_K, seed=tokens)
    x = torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(tokens))
    return x.bfloat16().cuda(), ids, weights


@pytest.fixture(params=["this GPU's kernels", "the portable kernels"])
def portable(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Runs a test with both sources where this GPU has one of its own."""
    own = Target.of(*torch.cuda.get_device_capability())
    other: bool = request.param == "the portable kernels"
    if other:
        if not own.wgmma:
            pytest.skip("this GPU has no other kernels")
        target = Target("90", own.decode)
        monkeypatch.setattr(Target, "of", classmethod(lambda cls, major, minor: target))
    return other


@pytest.mark.parametrize("kinds", [["base"], ["mxfp4"], ["nvfp4"], MIXTURE])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.usefixtures("portable")
def test_matches_float64(shape: tuple[int, int, int], kinds: list[str]) -> None:
    tested = layer(shape, kinds)
    operator = prefill(tested)
    for tokens, limit in ((17, None), (100, 0.5), (500, None)):
        x, ids, weights = batch(tokens, shape[0])
        ids[-1, 0] = -1
        ids[3] = -1
        out = run(tested, operator, x, ids, weights, limit)
        assert relative_error(out, tested.reference(x, ids, weights, SwiGLU(limit))) < BOUND
        assert not out[3].any()


@pytest.mark.usefixtures("portable")
def test_fp8_activations() -> None:
    for kinds in (["base"], MIXTURE):
        tested = layer(SHAPES[0], kinds)
        operator = prefill(tested, fp8=True)
        x, ids, weights = batch(300, SHAPES[0][0])
        out = run(tested, operator, x, ids, weights)
        assert relative_error(out, tested.reference(x, ids, weights, SwiGLU())) < FP8_BOUND
        assert torch.equal(run(tested, operator, x, ids, weights), out)


@pytest.mark.usefixtures("portable")
def test_all_tokens_choose_the_same_experts() -> None:
    tested = layer(SHAPES[0], MIXTURE)
    operator = prefill(tested)
    x, ids, weights = batch(400, SHAPES[0][0])
    ids[:] = torch.tensor([7, 2, 0, 13], dtype=torch.int32)
    out = run(tested, operator, x, ids, weights)
    assert relative_error(out, tested.reference(x, ids, weights, SwiGLU())) < BOUND


def test_no_expert_at_all() -> None:
    tested = layer(SHAPES[0], ["base"])
    x, ids, weights = batch(20, SHAPES[0][0])
    out = run(tested, prefill(tested), x, torch.full_like(ids, -1), weights)
    assert torch.equal(out, torch.zeros_like(out))


@pytest.mark.usefixtures("portable")
def test_same_bits_run_to_run_and_in_a_graph() -> None:
    tested = layer(SHAPES[0], MIXTURE)
    operator = prefill(tested)
    x, ids, weights = batch(300, SHAPES[0][0])
    first = run(tested, operator, x, ids, weights)
    for _ in range(20):
        assert torch.equal(run(tested, operator, x, ids, weights), first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = run(tested, operator, x, ids, weights)
    for _ in range(20):
        replayed.fill_(float("nan"))
        graph.replay()
        assert torch.equal(replayed, first)


@pytest.mark.usefixtures("portable")
def test_a_token_does_not_depend_on_its_neighbours() -> None:
    tested = layer(SHAPES[0], MIXTURE)
    operator = prefill(tested)
    x, ids, weights = batch(300, SHAPES[0][0])
    together = run(tested, operator, x, ids, weights)
    order = torch.randperm(300, device="cuda")
    assert torch.equal(run(tested, operator, x[order], ids[order], weights[order]), together[order])
    for part in (slice(0, 17), slice(30, 100)):
        assert torch.equal(run(tested, operator, x[part], ids[part], weights[part]), together[part])


def test_same_bits_for_any_placement() -> None:
    tested = layer(SHAPES[0], MIXTURE)
    operator = prefill(tested)
    x, ids, weights = batch(100, SHAPES[0][0])
    first = run(tested, operator, x, ids, weights)
    pinned = {e: tested.rows[e].cpu().pin_memory() for e in range(0, EXPERTS, 3)}
    address = tested.address.clone()
    for e, row in pinned.items():
        address[e] = row.data_ptr()
        tested.precision[e] += REMOTE
    assert torch.equal(run(tested, operator, x, ids, weights, address=address), first)


def test_waves_and_absent_rows_add_up_to_the_same_bits() -> None:
    tested = layer(SHAPES[0], MIXTURE)
    operator = prefill(tested)
    x, ids, weights = batch(100, SHAPES[0][0])
    whole = run(tested, operator, x, ids, weights)
    out = torch.zeros_like(whole)
    for part in (slice(0, 5), slice(5, EXPERTS)):
        address = torch.zeros_like(tested.address)
        address[part] = tested.address[part]
        run(tested, operator, x, ids, weights, address=address, out=out, accumulate=True)
    assert torch.equal(out, whole)


def test_more_tokens_than_a_launch_takes() -> None:
    tested = layer(SHAPES[0], ["base"])
    operator = prefill(tested)
    x, ids, weights = batch(2 * MAX_TOKENS + 5, SHAPES[0][0])
    out = run(tested, operator, x, ids, weights)
    assert relative_error(out, tested.reference(x, ids, weights, SwiGLU())) < BOUND
    last = slice(2 * MAX_TOKENS, None)
    assert torch.equal(run(tested, operator, x[last], ids[last], weights[last]), out[last])


def test_bfloat16_output() -> None:
    tested = layer(SHAPES[0], ["base"])
    x, ids, weights = batch(40, SHAPES[0][0])
    out = run(tested, prefill(tested, torch.bfloat16), x, ids, weights)
    assert torch.equal(out, run(tested, prefill(tested), x, ids, weights).bfloat16())
