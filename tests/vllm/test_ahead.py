"""Which passes the runtime is told of, and which layers are hash-routed. And test_prefetch.py."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from moet.vllm import ahead, method
from moet.vllm.ahead import hash_tables, look_ahead
from moet.vllm.method import MoetMoEMethod
from moet.vllm.phase import Fp4Tokens, mark_fp4_tokens

TOKENS = torch.tensor([5, 6, 7])


class Model(nn.Module):
    def forward(self, input_ids, positions=None):
        return input_ids


@pytest.fixture
def told(monkeypatch):
    """What the runtime was told, and the forward context."""
    context = SimpleNamespace(attn_metadata={"a layer": object()}, additional_kwargs={})
    seen = []
    runtime = SimpleNamespace(prefetch=lambda ids: seen.append(ids.tolist()))
    monkeypatch.setattr(ahead, "get_forward_context", lambda: context)
    monkeypatch.setattr(method, "find_runtime", lambda config: runtime)
    model = Model()
    look_ahead(model, None)
    return SimpleNamespace(seen=seen, context=context, model=model)


def test_each_pass_with_requests(told):
    told.model(TOKENS, positions=None)
    told.model(input_ids=TOKENS[:1])
    assert told.seen == [[5, 6, 7], [5]]


def test_no_warm_up_pass_no_fp4_tokens_and_no_embeddings(told):
    told.model(input_ids=None)
    told.context.attn_metadata = None
    told.model(TOKENS)
    told.context.attn_metadata = {}
    mark_fp4_tokens(told.context, Fp4Tokens(np.ones(3, np.bool_), again=True))
    told.model(TOKENS)
    assert told.seen == []


def test_tables_are_those_of_our_layers():
    def layer(number, table, ours=True):
        of = MoetMoEMethod.__new__(MoetMoEMethod) if ours else object()
        if ours:
            of.layer = number
        return SimpleNamespace(
            router=SimpleNamespace(_hash_indices_table=table),
            routed_experts=SimpleNamespace(quant_method=of),
        )

    table = nn.Parameter(torch.zeros(4, 2, dtype=torch.int32), requires_grad=False)
    layers = {
        "attention": SimpleNamespace(),
        "0": layer(0, table),
        "1": layer(1, table, ours=False),
        "2": layer(2, None),
    }
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    found = hash_tables(config)
    assert list(found) == [0]
    assert found[0].data_ptr() == table.data_ptr()
