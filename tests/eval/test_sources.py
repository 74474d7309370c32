"""Sources of experts: the FP4 model, and the two ways to two bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moet.checkpoints import Checkpoint, ExpertWeights
from moet.eval.sources import fp4_experts, mapped, power_of_two_experts, two_bit_experts
from moet.quantize import QUANTIZERS
from tests.fixtures.checkpoints import write_checkpoint


def given(weight: torch.Tensor):
    return lambda layer, expert: ExpertWeights(weight, weight, weight)


def test_fp4_checkpoints_are_their_own_fp4_model(tmp_path):
    write_checkpoint(tmp_path, format="nvfp4", mtp_format="bf16")
    with Checkpoint.open(tmp_path) as checkpoint:
        experts = fp4_experts(checkpoint)
        for ours, stored in zip(experts(2, 3), checkpoint.decode_expert(2, 3), strict=True):
            assert torch.equal(ours, stored)
        # The BF16 draft layer gets MXFP4: 16 values by a power of two in each block.
        draft, exact = experts(3, 0).gate, checkpoint.decode_expert(3, 0).gate
        assert not torch.equal(draft, exact)
        assert (draft - exact).norm() < 0.2 * exact.norm()
        scale = 2.0 ** (torch.floor(torch.log2(exact.reshape(-1, 32).abs().amax(1))) - 2)
        codes = (draft.reshape(-1, 32) / scale[:, None]).abs().unique()
        assert set(codes.tolist()) <= {0, 0.5, 1, 1.5, 2, 3, 4, 6}


def test_power_of_two_scheme_by_hand():
    row = torch.zeros(32)
    row[:6] = torch.tensor([6.0, -2.5, 2.6, -0.1, 0.0, 0.0])  # amax 6: the scale is 1
    small = row / 64
    weight = torch.stack([torch.cat([row, small]), torch.zeros(64)])
    expected = torch.where(torch.arange(32) % 2 == 0, 1.0, -1.0)
    expected[:6] = torch.tensor([4.0, -1.0, 4.0, -1.0, 1.0, -1.0])
    found = power_of_two_experts(given(weight))(0, 0).down
    assert torch.equal(found[0], torch.cat([expected, expected / 64]))
    assert torch.equal(found[1], torch.zeros(64))


def test_power_of_two_scheme_against_the_codes_of_mxfp4():
    """E2M1 magnitudes 0 to 2 become 1, and 3 to 6 become 4; the scale stays."""
    rng = np.random.default_rng(0)
    magnitude = rng.choice([0.5, 1, 1.5, 2, 3, 4, 6], (8, 64))
    magnitude[:, ::32] = 4.0  # so that every block's scale is the one assumed
    sign, scale = rng.choice([-1, 1], (8, 64)), 2.0 ** rng.integers(-9, 3, (8, 2)).repeat(32, 1)
    weight = torch.from_numpy(sign * magnitude * scale).float()
    expected = torch.from_numpy(sign * np.where(magnitude > 2, 4, 1) * scale).float()
    assert torch.equal(power_of_two_experts(given(weight))(0, 0).up, expected)


def test_level_0_is_closer_than_the_power_of_two_scheme():
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    fitted = two_bit_experts(given(weight), QUANTIZERS["data-free"]())(0, 0).gate
    fixed = power_of_two_experts(given(weight))(0, 0).gate
    assert (fitted - weight).norm() < (fixed - weight).norm() < 0.5 * weight.norm()
    blocks = fitted.reshape(-1, 32).abs()
    low, high = blocks.amin(1), blocks.amax(1)
    ratio = high / low
    assert torch.all((ratio == 1) | (ratio - 4 < 1e-5))


@pytest.mark.parametrize("projection", ["gate", "up", "down"])
def test_conversions_are_told_which_matrix_they_get(projection):
    seen = []

    def note(weight, context):
        seen.append((context.layer, context.expert, context.projection))
        return weight + 1

    weights = mapped(given(torch.zeros(1)), note)(4, 7)
    assert getattr(weights, projection) == 1
    assert (4, 7, projection) in seen
