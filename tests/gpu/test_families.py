"""Families on a GPU: served by real vLLM and compared with transformers, or, where the attention
has no kernels there, loaded through vLLM's model class and compared up to the routed experts.

The checkpoints are scaled down (`tests/fixtures/`) to sizes that the attention kernels take, with
random weights; the packs are made on the fly, at 2 bits. `benchmarks/families.py` runs the families
that are served at the same time, a process each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from moet.checkpoints import Checkpoint
from moet.eval.pack import packed_experts
from moet.formats import Precision
from moet.pack import Pack, PackRowSource
from tests.fixtures.checkpoints import write_checkpoint
from tests.gpu.families import LOADED, SERVED, Case
from tests.vllm.loading import check_experts, loaded
from tests.vllm.plain import load_plain
from tests.vllm.serving import (
    engine,
    generate,
    make_pack,
    prompt_logprobs,
    prompts,
    reference_logprobs,
)

pytestmark = pytest.mark.gpu

IDS = prompts(256, (3, 17, 40, 90, 5, 64, 33, 110))
SIZES = {"hidden": 256, "intermediate": 128, "top_k": 4}
TOKENS = 12


def write(place: Path, family: str, case: Case) -> tuple[Path, Path]:
    """(checkpoint, pack)."""
    model = write_checkpoint(place / "model", family, case.format, **{**SIZES, **case.written})
    return model, make_pack(model, place / "pack")


class Served:
    def __init__(self, case: Case, model: Path, pack: Path, llm: Any) -> None:
        self.case, self.model, self.pack, self.llm = case, model, Pack.open(pack), llm
        (stats,) = llm.collective_rpc("moet_stats")
        self.rows = sum(of["places"] for of in stats["tiers"] if of["tier"] == "gpu")

    def resize(self, slots: int, places: int) -> None:
        values = {"base_pool": str(slots), "arena": str(places)}
        (answer,) = self.llm.collective_rpc("moet_resize", args=(values,))
        assert "error" not in answer, answer

    def run(self) -> list[Any]:
        """Greedy tokens and their log-probabilities."""
        found = []
        for output in generate(self.llm, IDS, TOKENS, logprobs=0):
            of = output.outputs[0]
            rows = zip(of.token_ids, of.logprobs, strict=True)
            found.append([(token, row[token].logprob) for token, row in rows])
        return found


@pytest.fixture(scope="module", params=SERVED)
def served(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Served]:
    case = SERVED[request.param]
    model, pack = write(tmp_path_factory.mktemp(request.param), request.param, case)
    settings = {"pack": str(pack), "base_pool": "100%", "arena": "100%"}
    defaults = {
        "dtype": "bfloat16", "attention_backend": None, "gpu_memory_utilization": 0.08,
        "enable_prefix_caching": False,
    }  # fmt: skip
    with engine(model, settings, **{**defaults, **case.options}) as llm:
        yield Served(case, model, pack, llm)


def test_served_is_what_transformers_computes(
    served: Served, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """BF16 against float32: medians, since a few tokens are routed to other experts. How far BF16
    alone goes, transformers in BF16 says.

    What it records is a row of `benchmarks/families.py`'s table.
    """
    expected = {}
    opened = served.pack
    high = opened.layers[min(opened.layers)].layout.fp4.precision
    with Checkpoint.open(served.model) as checkpoint, PackRowSource(opened, checkpoint) as source:
        for precision in (Precision.BASE, high):
            experts = packed_experts(source, precision)
            twin = load_plain(checkpoint, tmp_path / precision, experts)
            expected[precision] = torch.cat(reference_logprobs(twin, IDS))
            if precision is Precision.BASE:
                rounded = torch.cat(reference_logprobs(twin.bfloat16(), IDS))
    found = torch.cat(prompt_logprobs(served.llm, IDS))
    error = (found - expected[Precision.BASE]).abs()
    rounding = (rounded - expected[Precision.BASE]).abs()
    other = (found - expected[high]).abs()
    row = {
        "family": served.case.name,
        "format": served.case.format,
        "tokens": len(error),
        "median_error": round(float(error.median()), 4),
        "median_bf16": round(float(rounding.median()), 4),
        "median_to_fp4": round(float(other.median()), 4),
    }
    print(row, "largest", error.max(), other.max())
    for key, value in row.items():
        record_property(key, value)
    assert error.median() < 1.25 * rounding.median()
    # What the experts' precision changes is far more than what BF16 does.
    assert 3 * error.median() < other.median()


def test_same_bits_with_a_fifth_of_the_rows_on_the_gpu(served: Served) -> None:
    everything = served.run()
    layer = 8  # the most rows of a layer that a step can use
    served.resize(max(served.rows // 5, 2), max(served.rows // 3, layer + 2))
    try:
        for _ in range(2):
            assert served.run() == everything
    finally:
        served.resize(served.rows, served.rows)


@pytest.mark.parametrize("family", LOADED)
def test_loaded_experts_are_the_packs(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GLM-5's class asks for DeepGEMM when it is made; only its forward pass uses it.
    indexer = "vllm.model_executor.layers.sparse_attn_indexer.has_deep_gemm"
    monkeypatch.setattr(indexer, lambda: True)
    model, pack = write(tmp_path, family, LOADED[family])
    settings = {"pack": str(pack), "base_pool": "50%", "arena": "100%"}
    gpu = torch.device("cuda:0")
    with loaded(model, settings, gpu) as config:
        check_experts(config, model, pack, gpu, object())
