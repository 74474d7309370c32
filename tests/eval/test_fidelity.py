"""KL and agreement by hand, and the model against transformers' own loading."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from moet.checkpoints import Checkpoint, ExpertWeights
from moet.eval.fidelity import Fidelity, compare
from moet.eval.heldout import HeldOut
from moet.eval.reference import fused_experts, load_reference, relative_rms
from tests.fixtures.checkpoints import write_checkpoint


class Table(nn.Module):
    """A "model" whose next-token logits are a row of a table."""

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.table = table

    def forward(self, tokens: torch.Tensor, use_cache: bool) -> SimpleNamespace:
        return SimpleNamespace(logits=self.table[tokens])


def random_windows(seed: int, vocab: int = 11) -> HeldOut:
    rng = np.random.default_rng(seed)
    return HeldOut(("a", "b"), rng.integers(0, vocab, (2, 3, 8)))


def test_kl_agreement_and_loss_by_hand():
    rng = torch.Generator().manual_seed(0)
    p, q = (torch.randn(11, 11, generator=rng) for _ in range(2))
    heldout = random_windows(1)
    found = compare(Table(p), Table(q), heldout, batch=2)

    P, Q = (np.exp(t.double().numpy()) / np.exp(t.double().numpy()).sum(1)[:, None] for t in (p, q))
    context, target = heldout.tokens[..., :-1], heldout.tokens[..., 1:]
    kl = (P * np.log(P / Q)).sum(1)[context].mean(-1)
    agree = (P.argmax(1) == Q.argmax(1))[context].mean(-1)
    np.testing.assert_allclose(found.kl, kl, rtol=1e-5)
    np.testing.assert_allclose(found.top1, agree, rtol=1e-6)
    np.testing.assert_allclose(found.nll, -np.log(Q[context, target]).mean(-1), rtol=1e-5)

    rows = found.rows()
    assert [row.segment for row in rows] == ["a", "b", "mean"]
    assert rows[1].kl == pytest.approx(kl[1].mean(), rel=1e-5)
    assert rows[1].kl_se == pytest.approx(kl[1].std(ddof=1) / 3**0.5, rel=1e-5)
    assert rows[2].kl == pytest.approx(kl.mean(), rel=1e-5)
    assert rows[2].kl_se == pytest.approx(np.hypot(rows[0].kl_se, rows[1].kl_se) / 2)


def test_a_model_agrees_with_itself():
    table = Table(torch.randn(11, 11))
    found = compare(table, table, random_windows(2)).rows()[-1]
    assert (found.kl, found.kl_se, found.top1) == (0.0, 0.0, 1.0)


def test_paired_difference_takes_out_what_windows_share():
    kl = np.random.default_rng(3).uniform(0, 5, (2, 16))
    base = Fidelity(("a", "b"), kl, kl, kl)
    worse = Fidelity(("a", "b"), kl + 0.01, kl, kl)
    difference, error = worse.kl_difference(base)
    assert difference == pytest.approx(0.01)
    assert error == pytest.approx(0.0, abs=1e-12)
    assert base.rows()[-1].kl_se > 0.1


def read_bf16(checkpoint: Checkpoint):
    def experts(layer: int, expert: int) -> ExpertWeights:
        source = checkpoint.read_expert(layer, expert)
        return ExpertWeights(*(source[p].parts["weight"].float() for p in ("gate", "up", "down")))

    return experts


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe", "glm4_moe"])
def test_the_model_is_transformers_own(tmp_path, family):
    write_checkpoint(tmp_path, family)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = torch.arange(40)[None]
    with Checkpoint.open(tmp_path) as checkpoint, torch.no_grad():
        before = copy.deepcopy(checkpoint.config)
        ours = load_reference(checkpoint, read_bf16(checkpoint))
        assert checkpoint.config == before
        assert torch.equal(ours(tokens).logits, theirs(tokens).logits)
        assert relative_rms(theirs, ours) == 0.0


@pytest.mark.parametrize("format", ["nvfp4", "fp8_block"])
def test_a_quantized_checkpoint_loads_with_the_experts_given(tmp_path, format):
    write_checkpoint(tmp_path, format=format)
    with Checkpoint.open(tmp_path) as checkpoint, torch.no_grad():
        gate, up, down = torch.randn(64, 128), torch.randn(64, 128), torch.randn(128, 64)

        def experts(layer: int, expert: int) -> ExpertWeights:
            return ExpertWeights(gate * expert, up * layer, down)

        model = load_reference(checkpoint, experts)
        fused = fused_experts(model, 2)
        assert torch.equal(fused.gate_up_proj[3], torch.cat([gate * 3, up * 2]))
        assert torch.equal(fused.down_proj[7], down)
        stored = checkpoint.read_tensor("model.layers.2.mlp.gate.weight")
        assert torch.equal(model.get_submodule("model.layers.2.mlp.gate").weight, stored.float())
        assert model(torch.arange(8)[None]).logits.isfinite().all()


def test_relative_rms(tmp_path):
    write_checkpoint(tmp_path, "qwen3_moe")
    with Checkpoint.open(tmp_path) as checkpoint:
        exact = read_bf16(checkpoint)
        model = load_reference(checkpoint, exact)
        scaled = load_reference(
            checkpoint,
            lambda layer, expert: ExpertWeights(*(w * 1.25 for w in exact(layer, expert))),
        )
        assert relative_rms(model, scaled) == pytest.approx(0.25)
