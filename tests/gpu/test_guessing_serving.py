"""Guessing the next layer's rows in real vLLM, with CUDA graphs: no bit changes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("vllm")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from tests.gpu.served import Served
from tests.vllm.serving import NANO, engine, make_pack

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    pack = make_pack(NANO, tmp_path_factory.mktemp("nano") / "pack")
    settings = {
        "pack": str(pack), "base_pool": "100%", "arena": "100%", "guess_next_layer": True,
    }  # fmt: skip
    with engine(
        NANO, settings, dtype="bfloat16", enforce_eager=False, max_num_seqs=16,
        attention_backend=None, gpu_memory_utilization=0.1, enable_prefix_caching=False,
    ) as llm:  # fmt: skip
        yield Served(NANO, pack, llm)


def test_no_bit_changes_in_vllm(served: Served) -> None:
    """All rows on the GPU, where nothing is copied; then few, in the arena, and on disk."""

    def remote(before: dict, after: dict) -> float:  # type: ignore[type-arg]
        """The share of decode's rows that were not in GPU memory."""

        def rows(stats: dict, tiers: tuple[str, ...]) -> int:  # type: ignore[type-arg]
            return sum(
                of["rows"] for of in stats["rows"]
                if of["phase"] == "decode" and of["tier"] in tiers
            )  # fmt: skip

        far, all_tiers = ("arena", "disk"), ("gpu", "arena", "disk")
        return (rows(after, far) - rows(before, far)) / (
            rows(after, all_tiers) - rows(before, all_tiers)
        )

    expected = {together: served.run(together) for together in (False, True)}
    for slots, places in ((0.5, 1.0), (0.1, 1.0), (0.1, 0.4)):
        served.resize(round(served.rows * slots), round(served.rows * places))
        before = served.stats()
        for together in (False, True, False):
            assert served.run(together) == expected[together]
        share = remote(before, served.stats())
        print("remote", slots, places, share)
        assert 0 < share < 1 - slots  # some were guessed
