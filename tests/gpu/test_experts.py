"""The decode kernel against a float64 reference, and its promises: same bits run to run, under
graph replay, wherever the rows lie, and whoever else is in the batch; and which kernels a call goes
through."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moet.formats.layout import Precision, RowLayout
from moet.kernels.base import OPERATORS, ExpertRows, SwiGLU
from moet.kernels.cuda.compiler import compile_text
from moet.kernels.cuda.decode import DecodeExperts
from moet.kernels.cuda.experts import CudaExperts
from moet.kernels.cuda.launch import Kernel
from moet.kernels.cuda.prefill import PrefillExperts
from moet.kernels.cuda.shape import REMOTE
from tests.gpu.experts import Layer, random_routing, relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

BOUND = 4e-3


def layer(hidden: int, intermediate: int, slices: int, experts: int, kinds: list[str]) -> Layer:
    layouts = {Precision(k): RowLayout(Precision(k), hidden, intermediate, slices) for k in kinds}
    return Layer.random(layouts, [Precision(kinds[e % len(kinds)]) for e in range(experts)], 1)


def run(layer: Layer, operator, x, ids, weights, activation=SwiGLU()):  # type: ignore[no-untyped-def]  # noqa: B008
    out = torch.full(x.shape, float("nan"), dtype=operator.out_dtype, device="cuda")
    operator.forward(x, ids, weights, layer.address, layer.precision, layer.factor, activation, out)
    return out


@pytest.mark.parametrize("kinds", [["base"], ["mxfp4"], ["nvfp4"], ["base", "mxfp4", "nvfp4"]])
@pytest.mark.parametrize(
    ("hidden", "intermediate", "slices"), [(512, 512, 4), (1024, 768, 8), (2048, 512, 1)]
)
@pytest.mark.parametrize("limit", [None, 0.5])
def test_matches_float64(kinds, hidden, intermediate, slices, limit) -> None:  # type: ignore[no-untyped-def]
    tested = layer(hidden, intermediate, slices, 16, kinds)
    operator = tested.decoding(top_k=4)
    for tokens in (1, 3, 8, 16):
        ids, weights = random_routing(tokens, 16, 4, seed=tokens)
        ids[-1, 0] = -1
        x = torch.randn(tokens, hidden, device="cuda").bfloat16()
        out = run(tested, operator, x, ids, weights, SwiGLU(limit))
        assert relative_error(out, tested.reference(x, ids, weights, SwiGLU(limit))) < BOUND


@pytest.mark.parametrize(
    ("hidden", "intermediate", "kinds"),
    [(4096, 2048, ["base", "mxfp4"]), (7168, 2048, ["base"]), (2048, 768, ["base", "nvfp4"])],
)
def test_model_shapes(hidden: int, intermediate: int, kinds: list[str]) -> None:
    tested = layer(hidden, intermediate, 8, 6, kinds)
    ids, weights = random_routing(5, 6, 6, seed=1)
    x = torch.randn(5, hidden, device="cuda").bfloat16()
    out = run(tested, tested.decoding(top_k=6), x, ids, weights)
    assert relative_error(out, tested.reference(x, ids, weights, SwiGLU())) < BOUND


_POISON = """
extern "C" __global__ void poison(int words) {
  extern __shared__ volatile unsigned memory[];
  for (int i = threadIdx.x; i < words; i += blockDim.x) memory[i] = 0xFFFFFFFFu;
}
"""


@pytest.fixture(scope="module")
def poison():  # type: ignore[no-untyped-def]
    """Fills the shared memory of all SMs with NaN (in E4M3 and BF16), as other kernels may."""
    properties = torch.cuda.get_device_properties(0)
    architecture = f"{properties.major}{properties.minor}"
    size = properties.shared_memory_per_block_optin // 4
    kernel = Kernel(compile_text(_POISON, "poison.cu", architecture, {}), "poison", size * 4)
    blocks = (properties.multi_processor_count, 1)
    return lambda: kernel.launch(blocks, 512, torch.cuda.current_stream().cuda_stream, [size])


@pytest.mark.parametrize(
    ("hidden", "intermediate", "slices"), [(256, 128, 4), (256, 32, 1), (128, 64, 1)]
)
def test_nothing_is_read_that_was_not_written(poison, hidden, intermediate, slices) -> None:  # type: ignore[no-untyped-def]
    """Narrow experts leave some warps without work; what these multiply must be there anyway."""
    tested = layer(hidden, intermediate, slices, 16, ["base", "mxfp4", "nvfp4"])
    operator = tested.decoding(top_k=4, out_dtype=torch.bfloat16)
    for tokens in (1, 3, 16):
        ids, weights = random_routing(tokens, 16, 4, seed=tokens)
        x = torch.randn(tokens, hidden, device="cuda").bfloat16()
        poison()
        out = run(tested, operator, x, ids, weights)
        assert relative_error(out.float(), tested.reference(x, ids, weights, SwiGLU())) < BOUND


def test_what_is_not_a_number_stays_so() -> None:
    tested = layer(512, 512, 4, 16, ["base"])
    ids, weights = random_routing(3, 16, 4, seed=3)
    x = torch.randn(3, 512, device="cuda").bfloat16()
    operator = tested.decoding(top_k=4, out_dtype=torch.bfloat16)
    for bad in (float("nan"), float("inf")):
        x[1, 7] = bad
        out = run(tested, operator, x, ids, weights)
        assert not out[1].isfinite().any()
        assert out[[0, 2]].isfinite().all()


def test_all_tokens_choose_one_expert() -> None:
    tested = layer(1024, 512, 4, 4, ["base", "mxfp4", "nvfp4", "base"])
    x = torch.randn(16, 1024, device="cuda").bfloat16()
    for expert in range(3):
        ids = torch.full((16, 1), expert, dtype=torch.int32, device="cuda")
        weights = torch.rand(16, 1, device="cuda")
        out = run(tested, tested.decoding(top_k=1), x, ids, weights)
        assert relative_error(out, tested.reference(x, ids, weights, SwiGLU())) < BOUND


def test_no_expert_at_all() -> None:
    tested = layer(512, 512, 4, 8, ["base"])
    x = torch.randn(2, 512, device="cuda").bfloat16()
    ids = torch.full((2, 4), -1, dtype=torch.int32, device="cuda")
    out = run(tested, tested.decoding(top_k=4), x, ids, torch.ones(2, 4, device="cuda"))
    assert torch.equal(out, torch.zeros_like(out))


def test_same_bits_run_to_run_and_in_a_graph() -> None:
    tested = layer(1024, 768, 8, 32, ["base", "mxfp4", "nvfp4"])
    operator = tested.decoding(top_k=6)
    ids, weights = random_routing(16, 32, 6, seed=3)
    x = torch.randn(16, 1024, device="cuda").bfloat16()
    first = run(tested, operator, x, ids, weights)
    for _ in range(50):
        assert torch.equal(run(tested, operator, x, ids, weights), first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = run(tested, operator, x, ids, weights)
    for _ in range(50):
        replayed.fill_(float("nan"))
        graph.replay()
        assert torch.equal(replayed, first)


def test_same_bits_for_any_placement() -> None:
    tested = layer(1024, 512, 4, 16, ["base", "mxfp4"])
    operator = tested.decoding(top_k=4)
    ids, weights = random_routing(8, 16, 4, seed=4)
    x = torch.randn(8, 1024, device="cuda").bfloat16()
    first = run(tested, operator, x, ids, weights)
    for moved in (range(0, 16, 3), range(16)):
        pinned = {e: tested.rows[e].cpu().pin_memory() for e in moved}
        address, marked = tested.address.clone(), tested.precision.clone()
        for e, row in pinned.items():
            address[e] = row.data_ptr()
            marked[e] += REMOTE
        for precision in (tested.precision, marked):
            out = torch.empty_like(first)
            operator.forward(x, ids, weights, address, precision, tested.factor, SwiGLU(), out)
            assert torch.equal(out, first)


def test_launch_numbers_come_round() -> None:
    """Results travel between blocks under the launch's number, which has 32 bits."""
    tested = layer(1024, 512, 4, 16, ["base", "mxfp4"])
    operator = tested.decoding(top_k=4)
    ids, weights = random_routing(16, 16, 4, seed=8)
    x = torch.randn(16, 1024, device="cuda").bfloat16()
    first = run(tested, operator, x, ids, weights)
    blocks = torch.cuda.get_device_properties(0).multi_processor_count
    operator._arrivals.fill_(blocks * (2**32 - 1 - 70))
    for _ in range(140):  # most pairs' words go unused for longer than it takes to forget them
        alone = run(tested, operator, x[:1], ids[:1], weights[:1])
        assert torch.equal(alone[0], first[0])
    assert torch.equal(run(tested, operator, x, ids, weights), first)


@pytest.mark.parametrize("tokens", [1, 16])
@pytest.mark.parametrize("kind", ["base", "mxfp4", "nvfp4"])
def test_fp8_activations(kind: str, tokens: int) -> None:
    """E4M3 has three mantissa bits: x and h lose 2.6 % each (norm) when they are normal."""
    tested = layer(1024, 512, 4, 16, [kind])
    exact = tested.decoding(top_k=4)
    operator = DecodeExperts(exact.shape, torch.device("cuda"), fp8_activations=True)
    ids, weights = random_routing(tokens, 16, 4, seed=9)
    x = torch.randn(tokens, 1024, device="cuda").bfloat16()
    got = run(tested, operator, x, ids, weights)
    want = run(tested, exact, x, ids, weights)
    assert 1e-3 < ((got - want).norm() / want.norm()).item() < 0.07
    assert torch.equal(run(tested, operator, x, ids, weights), got)


def test_a_token_does_not_depend_on_its_neighbours() -> None:
    tested = layer(1024, 512, 4, 16, ["base", "nvfp4"])
    operator = tested.decoding(top_k=4)
    ids, weights = random_routing(16, 16, 4, seed=5)
    x = torch.randn(16, 1024, device="cuda").bfloat16()
    together = run(tested, operator, x, ids, weights)
    for t in range(16):
        alone = run(tested, operator, x[t : t + 1], ids[t : t + 1], weights[t : t + 1])
        assert torch.equal(alone[0], together[t])


def test_waves_add_up_to_the_same_bits() -> None:
    tested = layer(1024, 512, 4, 16, ["base"])
    operator = tested.decoding(top_k=4)
    ids, weights = random_routing(8, 16, 4, seed=6)
    x = torch.randn(8, 1024, device="cuda").bfloat16()
    whole = run(tested, operator, x, ids, weights)
    out = torch.zeros_like(whole)
    for part in (slice(0, 5), slice(5, 16)):
        address = torch.zeros_like(tested.address)
        address[part] = tested.address[part]
        operator.forward(
            x, ids, weights, address, tested.precision, tested.factor, SwiGLU(), out,
            accumulate=True,
        )  # fmt: skip
    assert torch.equal(out, whole)


def test_bfloat16_output() -> None:
    tested = layer(512, 512, 4, 8, ["base"])
    ids, weights = random_routing(4, 8, 4, seed=7)
    x = torch.randn(4, 512, device="cuda").bfloat16()
    out = run(tested, tested.decoding(4, torch.bfloat16), x, ids, weights)
    wide = run(tested, tested.decoding(4), x, ids, weights)
    assert torch.equal(out, wide.bfloat16())


@pytest.mark.parametrize("kinds", [["base"], ["base", "mxfp4", "nvfp4"]])
@pytest.mark.parametrize(("experts", "top_k"), [(16, 4), (64, 8)])
def test_several_tokens_a_launch(kinds: list[str], experts: int, top_k: int) -> None:
    """As many pairs as a plan takes (32 tokens of 8 experts), and more tokens than a launch takes;
    the bits do not depend on how many tokens a launch takes."""
    tested = layer(1024, 512, 4, experts, kinds)
    few, several = tested.decoding(top_k), tested.decoding(top_k, most_tokens=32)
    for tokens in (17, several.max_tokens, 40):
        ids, weights = random_routing(tokens, experts, top_k, seed=tokens)
        ids[3] = -1
        x = torch.randn(tokens, 1024, device="cuda").bfloat16()
        out = run(tested, several, x, ids, weights)
        assert relative_error(out, tested.reference(x, ids, weights, SwiGLU())) < BOUND
        assert torch.equal(out, run(tested, few, x, ids, weights))
        assert torch.equal(out, run(tested, several, x, ids, weights))


def test_which_kernels_a_call_goes_through() -> None:
    """All tokens of a call through the decode kernel, or all through the prefill kernels."""
    tested = layer(512, 512, 4, 8, ["base"])
    shape, device = tested.shape(4), torch.device("cuda")
    operator = CudaExperts(shape, device, prefill_tokens=512)
    decoded = operator.decoded_tokens
    assert decoded > 16
    prefilling = PrefillExperts(shape, device, max_tokens=512)
    for tokens, same, other in (
        (16, tested.decoding(4), prefilling),
        (decoded, tested.decoding(4), prefilling),
        (decoded + 1, prefilling, tested.decoding(4)),
    ):
        ids, weights = random_routing(tokens, 8, 4, seed=8)
        x = torch.randn(tokens, 512, device="cuda").bfloat16()
        out = run(tested, operator, x, ids, weights)
        assert torch.equal(out, run(tested, same, x, ids, weights))
        assert not torch.equal(out, run(tested, other, x, ids, weights))


def test_the_registered_operator_adds_to_out() -> None:
    tested = layer(512, 512, 4, 8, ["base", "mxfp4"])
    ids, weights = random_routing(3, 8, 4, seed=9)
    x = torch.randn(3, 512, device="cuda").bfloat16()
    wide = run(tested, tested.decoding(4), x, ids, weights)
    rows = ExpertRows(
        np.arange(8),
        tested.address.cpu().numpy(),
        tested.precisions,
        tested.factor.cpu().numpy(),
        tested.layouts,
    )
    out = torch.zeros_like(wide)
    OPERATORS["cuda"]().accumulate(x.float(), ids, weights, rows, SwiGLU(), out)
    assert torch.equal(out, wide)
