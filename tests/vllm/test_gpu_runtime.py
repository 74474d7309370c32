"""Which precision a GPU computes layers at: the launches, on a stand-in for device and kernels.

What a stand-in cannot show is in tests/gpu/test_gate.py.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from moet.formats.layout import Precision
from moet.kernels import SwiGLU
from moet.kernels.cuda.shape import PRECISION_CODES
from moet.residency.hot_set import HotSetOptions
from moet.residency.tiers.hot import TierHotSet
from moet.vllm.gpu import GPURuntime
from moet.vllm.gpu_hot import HotSteps
from moet.vllm.gpu_tables import codes
from moet.vllm.phase import Fp4Tokens

BASE, FP4 = Precision.BASE, Precision.NVFP4
LAYERS, EXPERTS, TOP_K, HIDDEN = (3, 5), 8, 2, 4
FACTOR = {BASE: 1.0, FP4: 64.0}
# Expert 0 of each layer always runs at FP4.
PRECISION = {layer: [FP4, *[BASE] * (EXPERTS - 1)] for layer in LAYERS}
META = {"a layer": object()}


class Device:
    """Notes the looks; a row's address is its expert's number + 1."""

    def __init__(self):
        self.code = torch.from_numpy(codes(PRECISION))
        self.looks = []
        self.finished = 0

    def ensure(self, layer, topk_ids, *, code, repeats, part):
        self.looks.append((layer, topk_ids.tolist(), repeats, part))
        address = torch.arange(EXPERTS) + 1
        return SimpleNamespace(address=address, precision=code[layer].clone())

    def finish(self):
        self.finished += 1

    def foresee(self, tables):
        self.tables = tables

    def ahead(self, token_ids, code):
        self.looks.append((token_ids.tolist(), code))


class Operator:
    """A token's output is the sum of weight · factor; the factor must fit the precision."""

    out_dtype = torch.bfloat16

    def forward(
        self, x, ids, weights, address, precision, factors, activation, out, accumulate, bias
    ):
        wanted = torch.where(precision == PRECISION_CODES[FP4], FACTOR[FP4], FACTOR[BASE])
        assert torch.equal(factors[:, 0], wanted)
        padded = torch.cat([factors[:, 0], torch.zeros(1)])
        total = (weights * padded[ids.long()]).sum(-1, keepdim=True).to(out.dtype)
        out.copy_(out + total if accumulate else total.expand_as(out))


class Tiers:
    all_in_memory = True

    def close(self):
        pass


class Source:
    def factors(self, layer, precision):
        return np.full((EXPERTS, 3), FACTOR[precision], np.float32)

    def close(self):
        pass


@pytest.fixture
def made(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    geometry = SimpleNamespace(num_experts=EXPERTS)
    return GPURuntime(
        geometry, Tiers(), Device(), Source(), PRECISION, Operator(), frozenset([LAYERS[-1]]),
        recovery=dict.fromkeys(LAYERS, FP4),
    )  # fmt: skip


IDS = torch.tensor([[1, 2], [0, 3], [4, 5]])


def compute(made, layer=3, marks=None, again=False):
    fp4 = None if marks is None else Fp4Tokens(np.array(marks), again)
    x = torch.zeros(len(IDS), HIDDEN, dtype=torch.bfloat16)
    out = made.experts(layer, x, IDS, torch.ones(len(IDS), TOP_K), META, SwiGLU(), fp4)
    assert (out == out[:, :1]).all()
    return out[:, 0].tolist()


def test_each_expert_at_its_own_precision(made):
    assert compute(made) == [2, 65, 2]
    assert made.device.looks == [(0, IDS.tolist(), False, None)]


def test_marked_tokens_at_fp4_and_the_others_not(made):
    assert compute(made, marks=[True, False, True]) == [128, 65, 128]
    first, second = made.device.looks
    assert first == (0, [[-1, -1], [0, 3], [-1, -1]], False, 0)
    assert second == (0, [[1, 2], [-1, -1], [4, 5]], False, 1)


def test_padding_is_not_marked(made):
    assert compute(made, marks=[False, True]) == [2, 128, 2]


def test_where_all_are_marked_one_look_is_enough(made):
    assert compute(made, marks=[True, True], again=True) == [128, 128, 128]
    assert made.device.looks == [(0, IDS.tolist(), True, None)]


def test_a_pass_ends_with_the_last_layer(made):
    for marks in (None, [True, False], [True, True]):
        compute(made, 3, marks)
        compute(made, 5, marks)
    assert made.device.finished == 3


def test_all_at_fp4_and_back_in_the_tables_that_graphs_read(made):
    read = made.device.code
    assert made.all_at_fp4(False)
    assert made.all_at_fp4(True)
    assert compute(made) == [128, 128, 128]
    assert made.device.code is read
    assert (read == PRECISION_CODES[FP4]).all()
    made.all_at_fp4(False)
    assert compute(made) == [2, 65, 2]
    assert read.tolist() == codes(PRECISION).tolist()


def test_members_of_a_hot_set(made):
    members = np.zeros((len(LAYERS), EXPERTS), np.bool_)
    members[0, 2] = True
    made._now.mix(made._own, made._fp4, members)
    assert compute(made) == [65, 65, 2]
    assert compute(made, 5) == [2, 65, 2]


def test_a_hot_set_decides_from_the_counts_of_the_steps_before(made):
    """Every four steps, one step late; members join at the decision after."""
    use, fetched, seen = torch.zeros(len(LAYERS), EXPERTS, dtype=torch.int64), [], []
    use[1, 7] = 100  # of warm-up steps
    copied = SimpleNamespace(synchronize=lambda: None)
    made.device.copy_use = lambda into: (into.copy_(use), copied)[1]
    hot = TierHotSet(use.shape, HotSetOptions(4, 1.5), 2, lambda rows, failed: fetched.append(rows))
    steps = HotSteps(hot, 4, made.device, made._own, made._fp4, made._now)
    for step in range(9):
        steps.begin_step()
        seen.append((len(fetched), int(made.device.code[0, 2])))
        use[0, 2] += 1
        if step == 3:
            use[0, 5] += 100  # after the counts were copied
    code = PRECISION_CODES[FP4]
    assert seen == [(0, 0)] * 4 + [(1, 0)] * 4 + [(2, code)]
    assert fetched == [[2], [5]]


def test_hash_routed_layers_are_told_ahead_unless_all_rows_are_in_memory(made):
    table = torch.zeros(10, TOP_K, dtype=torch.int32)
    made.foresee({5: table})
    assert made.device.tables == {1: table}
    tokens = torch.tensor([3, 4])
    made.prefetch(tokens)
    assert made.device.looks == []
    made.tiers.all_in_memory = False
    made.prefetch(tokens)
    ((told, code),) = made.device.looks
    assert told == [3, 4]
    assert code is made.device.code  # what graphs read


def test_vllms_warm_up_asks_for_nothing(made):
    x = torch.ones(2, HIDDEN, dtype=torch.bfloat16)
    out = made.experts(3, x, IDS[:2], torch.ones(2, TOP_K), None, SwiGLU())
    assert (out == 0).all()
    assert not made.device.looks
