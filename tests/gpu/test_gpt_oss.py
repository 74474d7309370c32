"""gpt-oss's activation and biases in the CUDA kernels, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from moet.errors import ConfigError
from moet.formats.layout import Precision, RowLayout
from moet.kernels.base import GPT_OSS, SwiGLU
from moet.kernels.cuda.experts import CudaExperts
from moet.kernels.reference import gated
from tests.gpu.experts import Layer, dense, random_routing, relative_error

pytestmark = pytest.mark.gpu

EXPERTS, TOP_K = 12, 4


def exact(layer: Layer, bias: Tensor, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """float64 [T, hidden] on the CPU; the biases of down are left out."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    x, ids, weights, bias = x.cpu().double(), ids.cpu(), weights.cpu().double(), bias.cpu().double()
    for expert, precision in enumerate(layer.precisions):
        gate, up, down = dense(layer.layouts[precision], layer.rows[expert], layer.factor[expert])
        token, k = (ids == expert).nonzero(as_tuple=True)
        g, u = x[token] @ gate.T + bias[expert, 0], x[token] @ up.T + bias[expert, 1]
        out[token] += weights[token, k, None] * (gated(g, u, GPT_OSS) @ down.T)
    return out


@pytest.mark.parametrize(
    ("hidden", "intermediate", "slices"),
    [(256, 128, 4), (2880, 2880, 2), (512, 96, 1)],  # 2880: gpt-oss's own
)
@pytest.mark.parametrize("kinds", [["base", "mxfp4"]])
def test_matches_float64(kinds: list[str], hidden: int, intermediate: int, slices: int) -> None:
    layouts = {Precision(k): RowLayout(Precision(k), hidden, intermediate, slices) for k in kinds}
    precisions = [Precision(kinds[i % len(kinds)]) for i in range(EXPERTS)]
    layer = Layer.random(layouts, precisions, seed=1)
    shape = layer.shape(TOP_K)
    with_bias = type(shape).of(layouts, EXPERTS, TOP_K, gpt_oss=True)
    operator = CudaExperts(with_bias, torch.device("cuda"), prefill_tokens=512)
    bias = torch.randn(EXPERTS, 2, intermediate, device="cuda")
    tables = layer.address, layer.precision, layer.factor
    for tokens in (1, 5, 16, 32, 300):
        x = (4 * torch.randn(tokens, hidden, device="cuda")).bfloat16()
        ids, weights = random_routing(tokens, EXPERTS, TOP_K, seed=tokens)
        out = torch.full((tokens, hidden), float("nan"), device="cuda")
        operator.forward(x, ids, weights, *tables, GPT_OSS, out, bias=bias)
        expected = exact(layer, bias, x, ids, weights)
        assert relative_error(out, expected) < 0.01, tokens
        without = exact(layer, torch.zeros_like(bias), x, ids, weights)
        assert relative_error(out, without) > 0.02, tokens
    with pytest.raises(ConfigError, match="do not compute"):
        operator.forward(x, ids, weights, *tables, SwiGLU(7.0), out)
