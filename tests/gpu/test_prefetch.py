"""Hash-routed layers on a GPU: what is told ahead, and the same bits from vLLM's CUDA graphs."""

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from moet.residency.cuda import CudaTierDevice
from moet.residency.tiers import Entry, Place, Tier
from tests.gpu.served import serve
from tests.residency.cuda.source import BASE, FP4, ROW_BYTES
from tests.vllm.serving import NANO

pytestmark = pytest.mark.gpu

LAYERS, EXPERTS, TOP_K, VOCABULARY = 5, 300, 6, 1000


@pytest.mark.parametrize("kinds", [(torch.int32, torch.int64), (torch.int64, torch.int32)])
@pytest.mark.parametrize("tokens", [1, 7, 900])
def test_what_is_told_ahead(kinds, tokens):
    """The rows on disk, of each layer at its experts' precisions; told again by each replay."""
    rng = np.random.default_rng(tokens)
    code = rng.integers(0, 2, (LAYERS, EXPERTS)).astype(np.uint8)
    device = CudaTierDevice(code, ROW_BYTES, TOP_K, torch.device("cuda"), decode_tokens=8)
    tables = {
        layer: rng.integers(0, EXPERTS, (VOCABULARY, TOP_K)).astype(np.int64) for layer in (0, 3)
    }
    device.foresee({i: torch.from_numpy(of).to("cuda", kinds[1]) for i, of in tables.items()})
    device.resize(BASE, Tier.GPU, 1, ROW_BYTES[BASE])
    resident = rng.random((LAYERS, EXPERTS)) < 0.4
    device.publish([
        Entry((BASE, FP4)[code[layer, e]], layer, e, Place(BASE, Tier.GPU, 0))
        for layer, e in zip(*map(np.ndarray.tolist, resident.nonzero()), strict=True)
    ])  # fmt: skip
    ids = torch.zeros(tokens, dtype=kinds[0], device="cuda")
    device.ahead(ids)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        device.ahead(ids)
    device.poll_ahead()
    for _ in range(3):
        chosen = rng.integers(0, VOCABULARY, tokens)
        ids.copy_(torch.from_numpy(chosen))
        ids[-1] = -1 if tokens > 1 else int(chosen[0])
        chosen = chosen[: max(1, tokens - 1)]
        graph.replay()
        torch.cuda.synchronize()
        expected = {BASE: [], FP4: []}
        for layer, table in tables.items():
            for e in np.unique(table[chosen]).tolist():
                if not resident[layer, e]:
                    expected[(BASE, FP4)[code[layer, e]]].append(layer * EXPERTS + e)
        told = device.poll_ahead()
        assert (told or {BASE: [], FP4: []}) == expected
        assert device.poll_ahead() is None
    assert device.begun() == 0
    device.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with serve(
        NANO, tmp_path_factory.mktemp("nano"), {"prefill_staging": False},
        worker_extension_cls="tests.vllm.hashed.HashedTestExtension",
        compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
    ) as served:  # fmt: skip
        yield served


def test_same_bits_and_rows_read_ahead(served):
    """What is read ahead depends on how the threads run: of few steps it may be nothing."""
    expected = {together: served.run(together) for together in (False, True)}
    assert served.stats()["prefetched_rows"] == 0
    for slots, places in ((served.rows // 2, 20), (4, 50), (0, 60), (0, 34)):
        served.resize(slots, places)
        for together in (False, True):
            assert served.run(together) == expected[together], (slots, places, together)
        assert served.stats()["failed_requests"] == 0
    assert served.stats()["prefetched_rows"] > 0
