"""Engines for the serving tests: real vLLM, in processes of its own."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from vllm import LLM, SamplingParams, TokensPrompt

from moet.checkpoints import Checkpoint
from moet.pack import write_pack
from moet.quantize import QUANTIZERS

ROOT = Path(__file__).parents[2]
NANO = ROOT / "models" / "nano-moe"
LENGTHS = (3, 17, 40, 64, 1, 90, 5, 33)  # of eight prompts that run together


@contextmanager
def engine(model: Path, settings: dict[str, Any] | None, **options: Any) -> Iterator[LLM]:
    """A vLLM engine in float32; settings: moet's, None to serve without moet."""
    if settings is not None:
        options |= {
            "quantization": "moet",
            "additional_config": options.get("additional_config", {}) | {"moet": settings},
        }
        options.setdefault("worker_extension_cls", "tests.vllm.extension.ServingTestExtension")
    defaults = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 256,
        "max_num_seqs": 8,
        "kv_cache_memory_bytes": 64 << 20,
        "seed": 0,
        "skip_tokenizer_init": not (model / "tokenizer.json").exists(),
        # Not vLLM's first choice on every CPU: the AMX backend takes no float32.
        "attention_backend": "CPU_MLA"
        if "deepseek" in (model / "config.json").read_text()
        else None,
    }
    llm = LLM(model=str(model), **{**defaults, **options})
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def make_pack(model: Path, path: Path) -> Path:
    with Checkpoint.open(model) as checkpoint:
        write_pack(checkpoint, path, quantizer=QUANTIZERS["data-free"]())
    return path


def prompts(vocabulary: int, lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> list[list[int]]:
    """Random prompts of these lengths."""
    rng = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocabulary, (n,), generator=rng).tolist() for n in lengths]


def generate(llm: LLM, ids: list[list[int]], tokens: int, **sampling: Any) -> list[Any]:
    """Greedy outputs; later prompts get fewer tokens, so that some end while others run.

    The prompts are all queued before the first step: which of them a step has must not depend on
    the speed of this process, since other tokens in a batch may change bits of vLLM's dense layers.
    """
    parameters = [
        SamplingParams(
            temperature=0,
            max_tokens=max(1, tokens - i),
            ignore_eos=True,
            detokenize=False,
            **sampling,
        )
        for i in range(len(ids))
    ]
    llm.sleep(level=0)
    llm.enqueue([TokensPrompt(prompt_token_ids=p) for p in ids], parameters, use_tqdm=False)
    llm.wake_up(tags=["scheduling"])
    return llm.wait_for_completion(use_tqdm=False)


def prompt_logprobs(llm: LLM, ids: list[list[int]]) -> list[torch.Tensor]:
    """The log-probability of every prompt token but the first."""
    outputs = generate(llm, ids, 1, prompt_logprobs=0)
    return [
        torch.tensor([row[t].logprob for t, row in zip(p[1:], o.prompt_logprobs[1:], strict=True)])
        for p, o in zip(ids, outputs, strict=True)
    ]


@torch.no_grad()
def reference_logprobs(model: torch.nn.Module, ids: list[list[int]]) -> list[torch.Tensor]:
    """The same in transformers."""
    found = []
    for p in ids:
        logprobs = model(torch.tensor([p])).logits[0, :-1].float().log_softmax(-1)
        found.append(logprobs.gather(1, torch.tensor(p[1:], dtype=torch.long)[:, None])[:, 0])
    return found


@torch.no_grad()
def reference_tokens(model: torch.nn.Module, ids: list[list[int]], tokens: int) -> list[list[int]]:
    """Greedy continuations in transformers."""
    return [
        model.generate(
            torch.tensor([p]),
            max_new_tokens=max(1, tokens - i),
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )[0, len(p) :].tolist()
        for i, p in enumerate(ids)
    ]
