"""DeepSeek-V4 on the CPU: loaded by vLLM's own class, its experts computed; what is served of it
needs a GPU with DeepGEMM (docs/families.md)."""

import pytest
import torch

from tests.fixtures.checkpoints import write_checkpoint
from tests.vllm.loading import check_experts, loaded
from tests.vllm.serving import make_pack

pytestmark = pytest.mark.server


class Event:
    """torch without CUDA has none, and vLLM's class keeps some."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass


@pytest.mark.parametrize("family", ["deepseek_v4", "deepseek_v4_0731"])
def test_experts_are_the_packs(family, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)  # fails without CUDA
    model = write_checkpoint(
        tmp_path / "model", family, "mxfp4", hidden=256, intermediate=128, top_k=4,
        dense_fp8=True, mtp=False,
    )  # fmt: skip
    pack = make_pack(model, tmp_path / "pack")
    cpu = torch.device("cpu")
    with loaded(model, {"pack": str(pack), "base_pool": "75%"}, cpu) as config:
        check_experts(config, model, pack, cpu, None)
