"""Real vLLM on a GPU, with CUDA graphs: the same bits wherever rows are, and faults that end alone.

One engine a model: its tiers are resized between the tests.
"""

import pytest
import torch

pytest.importorskip("vllm")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from moet.checkpoints import Checkpoint
from moet.eval.reference import load_reference
from moet.eval.sources import two_bit_experts
from moet.formats.layout import Precision
from moet.quantize import QUANTIZERS
from tests.gpu.served import IDS, serve
from tests.vllm.serving import (
    ROOT,
    generate,
    prompt_logprobs,
    reference_logprobs,
)

pytestmark = pytest.mark.gpu

MODELS = sorted(path.parent for path in (ROOT / "models").glob("*/config.json"))


@pytest.fixture(scope="module", params=MODELS, ids=lambda path: path.name)
def served(request, tmp_path_factory):
    model = request.param
    directory = tmp_path_factory.mktemp(model.name)
    with serve(model, directory, {"prefill_staging": False}) as served:
        yield served


@pytest.fixture(scope="module")
def expected(served):
    return {together: served.run(together) for together in (False, True)}


def test_everything_on_the_gpu_agrees_with_the_reference(served):
    with Checkpoint.open(served.model) as checkpoint:
        reference = load_reference(
            checkpoint, two_bit_experts(checkpoint.decode_expert, QUANTIZERS["data-free"]())
        )
    ours = prompt_logprobs(served.llm, IDS)
    theirs = reference_logprobs(reference, IDS)
    errors = torch.cat(ours) - torch.cat(theirs)
    # BF16 activations against float32 ones.
    assert errors.abs().mean() < 0.05
    assert errors.mean().abs() < 0.01


@pytest.mark.parametrize("slots", [1.0, 0.5, 0.1])
@pytest.mark.parametrize("places", [1.0, 0.2])
def test_same_bits_wherever_rows_are(served, expected, slots, places):
    layer = 32  # the most rows of a layer that a step can use
    gpu = round(served.rows * slots)
    arena = max(round(served.rows * places), layer + 2 - gpu, 2)
    served.resize(gpu, arena)
    before = served.stats()
    for temperature in ("cold", "warm"):
        for together in (False, True):
            assert served.run(together) == expected[together], (temperature, together)
    after = served.stats()
    assert after["steps"] > before["steps"]
    if gpu + arena < served.rows:
        assert after["disk_reads"] > before["disk_reads"]


def test_a_damaged_row_ends_its_step_alone(served, expected):
    served.resize(4, 32)
    served.run(True)
    path = next(iter(served.pack.layers.values())).path
    layout = next(iter(served.pack.layers.values())).layout
    whole = path.read_bytes()
    try:
        with path.open("r+b") as file:
            for expert in range(layout.experts):
                at = layout.row_offset(Precision.BASE, expert) + 100
                file.seek(at)
                file.write(bytes([whole[at] ^ 1]))
        outputs = generate(served.llm, IDS, 4)
        assert {o.outputs[0].finish_reason for o in outputs} == {"error"}
        assert served.stats()["failed_requests"] > 0
    finally:
        with path.open("r+b") as file:
            file.write(whole)
    for together in (False, True):
        assert served.run(together) == expected[together]
