"""Families beyond the first: served by stock vLLM with moet, compared with transformers.

Each differs from the others in something that the experts' computation must honour: gpt-oss in
stacks, biases and activation, Llama 4 in stacks and in router weights on the input, Kimi-K2.5 in a
language model beside a vision tower, which is given an image, Qwen3-Next in its hybrid attention,
which vLLM's CPU build has in BF16 only.
"""

import numpy as np
import pytest
import torch
from PIL import Image
from vllm import SamplingParams, TokensPrompt
from vllm.transformers_utils.processors.kimi_k25_vision_fused import KimiK25FusedVisionProcessor

from moet.checkpoints import Checkpoint
from moet.eval.pack import packed_experts
from moet.formats import Precision
from moet.pack import Pack, PackRowSource
from tests.fixtures.checkpoints import write_checkpoint
from tests.fixtures.processor import IMAGE_TOKEN, KIMI_MEDIA, write_kimi_processor
from tests.vllm.plain import load_plain
from tests.vllm.serving import engine, make_pack, prompt_logprobs, prompts, reference_logprobs

pytestmark = pytest.mark.server
IDS = prompts(256, (3, 17, 40, 90))

# family → format, arguments of `write_checkpoint`, of the engine, largest error of a logprob
CASES = {
    "gpt_oss": ("mxfp4", {"layers": 2}, {}, 1e-4),
    "glm4_moe": ("nvfp4", {"layers": 2, "mtp_format": "bf16"}, {}, 1e-4),
    "kimi_k2": ("int4_group", {"layers": 2}, {"attention_backend": "CPU_MLA"}, 1e-4),
    "minimax_m2": ("fp8_block", {"layers": 2}, {}, 1e-4),
    "llama4_text": ("bf16", {"top_k": 1, "layers": 2}, {}, 1e-4),
    "kimi_k25": (
        "nvfp4",
        {"layers": 2, "config": {"image_token_id": IMAGE_TOKEN}},
        {"attention_backend": "CPU_MLA", "skip_mm_profiling": True},
        1e-4,
    ),
    # Every token goes to every expert: in BF16 the router's choice would differ now and then.
    "qwen3_next": (
        "bf16",
        {"layers": 2, "mtp": False, "top_k": 8},
        {"dtype": "bfloat16"},
        0.2,
    ),
}


@pytest.fixture(scope="module", params=CASES)
def served(request, tmp_path_factory):
    format, shape, options, tolerance = CASES[request.param]
    place = tmp_path_factory.mktemp(request.param)
    model = write_checkpoint(place / "model", request.param, format, **shape)
    if request.param == "kimi_k25":
        write_kimi_processor(model)
    pack = make_pack(model, place / "pack")
    settings = {"pack": str(pack), "precision": "fp4", "fp4_pool": "75%", "streaming_slots": 2}
    with engine(model, settings, **options) as llm:
        if request.param == "minimax_m2":
            llm.collective_rpc("moet_route_as_one_group")
        yield llm, model, pack, tolerance


def test_every_precision_is_what_transformers_computes(served, tmp_path):
    llm, model, pack, tolerance = served
    opened = Pack.open(pack)
    high = opened.layers[min(opened.layers)].layout.fp4.precision
    expected, found = {}, {}
    with Checkpoint.open(model) as checkpoint, PackRowSource(opened, checkpoint) as source:
        for precision in (high, Precision.BASE):
            reference = load_plain(
                checkpoint, tmp_path / precision, packed_experts(source, precision)
            )
            expected[precision] = torch.cat(reference_logprobs(reference, IDS))
    found[high] = torch.cat(prompt_logprobs(llm, IDS))
    llm.collective_rpc(
        "moet_configure", args=({"pack": str(pack), "base_pool": "75%", "streaming_slots": 2},)
    )
    found[Precision.BASE] = torch.cat(prompt_logprobs(llm, IDS))
    for ours, other in ((high, Precision.BASE), (Precision.BASE, high)):
        error = found[ours] - expected[ours]
        print(ours, float(error.abs().max()), float((found[ours] - expected[other]).abs().max()))
        assert error.abs().max() < tolerance
        # What the experts' precision changes is far more than what BF16 elsewhere does.
        assert 3 * error.norm() < (found[ours] - expected[other]).norm()


@torch.no_grad()
def image_logprobs(model, tokens, pixels, grid):
    logits = model(torch.tensor([tokens]), pixel_values=pixels, image_grid_thw=grid).logits
    found = logits[0, :-1].log_softmax(-1)
    return found.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


def test_an_image_is_seen_as_by_transformers(served, tmp_path):
    llm, model, pack, tolerance = served
    if "vision_config" not in (model / "config.json").read_text():
        pytest.skip("text only")
    noise = np.random.default_rng(0).integers(0, 256, (56, 84, 3), dtype=np.uint8)
    image = {"type": "image", "image": Image.fromarray(noise), "uuid": None}
    processor = KimiK25FusedVisionProcessor(KIMI_MEDIA)
    patches = processor.preprocess([image], return_tensors="pt")
    pixels, grid = patches["pixel_values"].float(), patches["grid_thws"]
    before, after = [10, 20], [30, 40, 50, 60, 70]
    places = processor.media_tokens_calculator(image)
    tokens = before + [IMAGE_TOKEN] * places + after
    with Checkpoint.open(model) as checkpoint, PackRowSource(Pack.open(pack), checkpoint) as source:
        twin = load_plain(checkpoint, tmp_path / "twin", packed_experts(source, Precision.BASE))
    settings = {"pack": str(pack), "base_pool": "75%", "streaming_slots": 2}
    llm.collective_rpc("moet_configure", args=(settings,))
    prompt = TokensPrompt(
        prompt_token_ids=[*before, IMAGE_TOKEN, *after],
        multi_modal_data={"vision_chunk": [image]},
    )
    sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    (output,) = llm.generate([prompt], sampling, use_tqdm=False)
    assert output.prompt_token_ids == tokens
    found = torch.tensor(
        [row[t].logprob for t, row in zip(tokens[1:], output.prompt_logprobs[1:], strict=True)]
    )
    expected = image_logprobs(twin, tokens, pixels, grid)
    assert (found - expected).abs().max() < tolerance
    unseen = image_logprobs(twin, tokens, torch.zeros_like(pixels), grid)
    assert (found - unseen)[-len(after) :].abs().max() > 0.1
