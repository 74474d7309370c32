"""Guessing the next layer's rows in real vLLM, with CUDA graphs: no bit changes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("vllm")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from tests.gpu.served import Served, serve
from tests.vllm.serving import NANO

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve(NANO, tmp_path_factory.mktemp("nano"), {"guess_next_layer": True}) as served:
        yield served


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
