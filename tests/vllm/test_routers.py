"""Which routers are found in a model."""

from types import SimpleNamespace

import torch
from torch import nn

from moet.vllm.method import MoetMoEMethod
from moet.vllm.routers import find_routers

EXPERTS, HIDDEN = 8, 16


def method(layer: int) -> MoetMoEMethod:
    made = object.__new__(MoetMoEMethod)
    made.layer = layer
    return made


class Layer(nn.Module):
    def __init__(self, gate: nn.Module) -> None:
        super().__init__()
        self.gate = gate


def found(gate: nn.Module, bias: torch.Tensor | None, scoring: str):  # type: ignore[no-untyped-def]
    model = nn.Module()
    model.mlp = Layer(gate)
    experts = SimpleNamespace(
        routed_experts=SimpleNamespace(quant_method=method(3), global_num_experts=EXPERTS),
        router=SimpleNamespace(e_score_correction_bias=bias, scoring_func=scoring),
    )
    other = SimpleNamespace()  # an attention layer
    context = {"mlp.experts": experts, "attn": other}
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=context))
    return find_routers(model, config)


def test_a_linear_layer_beside_the_experts() -> None:
    gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
    bias = torch.arange(EXPERTS, dtype=torch.float64)
    (router,) = found(gate, bias, "sigmoid").values()
    assert torch.equal(router.weight, gate.weight.bfloat16())
    assert torch.equal(router.bias, bias.float())
    assert router.scoring == 1
    plain = found(gate, None, "softmax")
    assert plain[3].bias is None
    assert plain[3].scoring == 0


def test_what_would_be_guessed_wrong_is_not_guessed() -> None:
    gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
    assert not found(gate, torch.zeros(EXPERTS), "softmax")  # + bias: no such kernel
    assert not found(nn.Linear(HIDDEN, EXPERTS), None, "softmax")  # a bias of the layer's own
    assert not found(nn.Linear(HIDDEN, EXPERTS + 1, bias=False), None, "softmax")
    gate.weight = nn.Parameter(gate.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
    assert not found(gate, None, "softmax")  # whose scales are elsewhere
