"""Two GPUs share the experts: each holds half of every row."""

import pytest
import torch

pytest.importorskip("vllm")
if torch.cuda.device_count() < 2:
    pytest.skip("needs two GPUs", allow_module_level=True)

from moet.checkpoints import Checkpoint
from moet.eval.reference import load_reference
from moet.eval.sources import two_bit_experts
from moet.formats.layout import Precision
from moet.quantize import QUANTIZERS
from tests.gpu.served import IDS, serve
from tests.vllm.serving import (
    NANO,
    generate,
    prompt_logprobs,
    reference_logprobs,
)

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    directory = tmp_path_factory.mktemp("nano")
    with serve(NANO, directory, {"prefill_staging": False}, tensor_parallel_size=2) as served:
        yield served


def test_agrees_with_the_reference(served):
    with Checkpoint.open(NANO) as checkpoint:
        reference = load_reference(
            checkpoint, two_bit_experts(checkpoint.decode_expert, QUANTIZERS["data-free"]())
        )
    errors = torch.cat(prompt_logprobs(served.llm, IDS))
    errors -= torch.cat(reference_logprobs(reference, IDS))
    # BF16 activations against float32 ones.
    assert errors.abs().mean() < 0.05
    assert errors.mean().abs() < 0.01


def test_each_rank_holds_half_of_a_row(served):
    half = next(iter(served.pack.layers.values())).layout.base.local(2).row_bytes
    for stats in served.llm.collective_rpc("moet_stats"):
        assert {tier["row_bytes"] for tier in stats["tiers"]} == {half}


@pytest.mark.parametrize(("slots", "places"), [(0.5, 1.0), (0.1, 0.4)])
def test_same_bits_wherever_rows_are(served, slots, places):
    expected = {together: served.run(together) for together in (False, True)}
    served.resize(round(served.rows * slots), round(served.rows * places))
    for _ in range(2):
        assert {together: served.run(together) for together in (False, True)} == expected


def test_a_row_that_one_rank_cannot_read_ends_its_step_alone(served):
    served.resize(4, 34)
    expected = served.run(True)
    layer = next(iter(served.pack.layers.values()))
    whole = layer.path.read_bytes()
    try:
        with layer.path.open("r+b") as file:
            for expert in range(layer.layout.experts):
                # In the last slice, which the second rank reads.
                at = layer.layout.row_offset(Precision.BASE, expert)
                at += layer.layout.base.payload_bytes - 100
                file.seek(at)
                file.write(bytes([whole[at] ^ 1]))
        outputs = generate(served.llm, IDS, 4)
        assert {o.outputs[0].finish_reason for o in outputs} == {"error"}
    finally:
        with layer.path.open("r+b") as file:
            file.write(whole)
    assert served.run(True) == expected
