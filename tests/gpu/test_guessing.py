"""Rows of the next layer, guessed and copied ahead: the right ones."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from moet.formats.layout import Precision
from moet.residency.cuda import CudaTierDevice
from moet.residency.cuda.kernels import Router
from moet.residency.tiers.device import Entry, Place, Tier

pytestmark = pytest.mark.gpu

BASE = Precision.BASE
LAYERS, EXPERTS, HIDDEN, TOP_K, ROW_BYTES = 3, 40, 512, 4, 1 << 20
ON_GPU = 10  # experts of each layer


@pytest.fixture
def device() -> Iterator[CudaTierDevice]:
    """Experts below `ON_GPU` have their rows on the GPU, the last has none, those of the others lie
    in the arena. Each row's bytes say which it is."""
    made = CudaTierDevice(
        np.zeros((LAYERS, EXPERTS), np.uint8), {BASE: ROW_BYTES}, TOP_K, torch.device("cuda"),
        decode_tokens=64,
    )  # fmt: skip
    made.resize(BASE, Tier.GPU, LAYERS * ON_GPU, ROW_BYTES)
    made.resize(BASE, Tier.ARENA, LAYERS * EXPERTS, ROW_BYTES)
    entries = []
    for layer in range(LAYERS):
        for expert in range(EXPERTS - 1):
            if expert < ON_GPU:
                place = Place(BASE, Tier.GPU, layer * ON_GPU + expert)
            else:
                place = Place(BASE, Tier.ARENA, layer * EXPERTS + expert)
                made.view(place)[:] = layer * EXPERTS + expert
            entries.append(Entry(BASE, layer, expert, place))
    made.publish(entries)
    yield made
    made.close()


def routers(scoring: int) -> dict[int, Router]:
    generator = torch.Generator("cuda").manual_seed(1)
    return {
        layer: Router(
            torch.randn(EXPERTS, HIDDEN, device="cuda", generator=generator).bfloat16(),
            torch.randn(EXPERTS, device="cuda", generator=generator) / 4 if scoring else None,
            scoring,
        )
        for layer in range(LAYERS)
    }


def chosen(router: Router, x: torch.Tensor) -> torch.Tensor:
    """By how many tokens each expert is chosen."""
    logits = x.double() @ router.weight.double().T
    scores = {0: logits, 1: logits.sigmoid(), 2: torch.nn.functional.softplus(logits).sqrt()}
    score = scores[router.scoring]
    if router.bias is not None:
        score = score + router.bias
    return torch.bincount(score.topk(TOP_K).indices.flatten(), minlength=EXPERTS)


@pytest.mark.parametrize("scoring", [0, 1, 2])
@pytest.mark.parametrize("tokens", [1, 3, 32])
def test_the_wanted_rows_are_copied(device: CudaTierDevice, scoring: int, tokens: int) -> None:
    known = routers(scoring)
    device.learn_routers(known, TOP_K)
    guessing = device.guessing
    assert guessing is not None
    padded = tokens + 2
    generator = torch.Generator("cuda").manual_seed(tokens)
    x = torch.randn(padded, HIDDEN, device="cuda", generator=generator).bfloat16() / 16
    ids = torch.full((padded, TOP_K), -1, dtype=torch.int32, device="cuda")
    ids[:tokens] = torch.arange(TOP_K, device="cuda", dtype=torch.int32)
    if padded > 32:
        x, ids = x[:32], ids[:32]
    wanted = chosen(known[1], x[:tokens]).cpu()

    def passes() -> None:
        guessing.guess(0, x, ids)
        device.ensure(0, ids)
        guessing.guessed()
        guessing.copy(device.code)
        device.ensure(1, ids)
        device.finish()

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        passes()
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        slot = guessing._buffer.slot.cpu()
        rows = guessing._buffer.rows.cpu().numpy()
        copied = (slot >= 0).nonzero().flatten().tolist()
        remote = [e for e in range(ON_GPU, EXPERTS - 1) if wanted[e]]
        assert len(copied) == min(len(remote), len(rows))
        assert set(copied) <= set(remote)
        assert sorted(slot[copied].tolist()) == list(range(len(copied)))
        left = [int(wanted[e]) for e in remote if e not in copied]
        assert max(left, default=0) <= min((int(wanted[e]) for e in copied), default=0)
        for expert in copied:
            assert (rows[slot[expert]] == EXPERTS + expert).all()


def test_a_layer_reads_what_was_copied_for_it(device: CudaTierDevice) -> None:
    known = routers(1)
    for router in known.values():
        assert router.bias is not None
        router.bias[-1] = -10.0  # whose row nobody would bring
    device.learn_routers(known, TOP_K)
    guessing = device.guessing
    assert guessing is not None
    x = torch.randn(1, HIDDEN, device="cuda").bfloat16()
    wanted = chosen(known[1], x).nonzero().flatten().int()[None].contiguous()
    guessing.guess(0, x, wanted)
    device.ensure(0, wanted)
    guessing.guessed()
    guessing.copy(device.code)
    snapshot = device.ensure(1, wanted)
    torch.cuda.synchronize()
    slot, address = guessing._buffer.slot.cpu(), snapshot.address.cpu()
    precision = snapshot.precision.cpu()
    start = guessing._buffer.rows.data_ptr()
    for expert in wanted.flatten().tolist():
        if slot[expert] >= 0:
            assert address[expert] == start + int(slot[expert]) * ROW_BYTES
            assert precision[expert] == 0  # no row in host memory
    device.ensure(2, wanted)  # for which nothing was guessed
    torch.cuda.synchronize()
    assert not ((address >= start) & (address < start + 8 * ROW_BYTES))[
        [e for e in range(EXPERTS) if slot[e] < 0]
    ].any()
    device.finish()
