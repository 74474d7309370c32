"""vLLM's offline engine with moet, for commands that run windows of text, one window a request."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm import LLM, SamplingParams, TokensPrompt

from moet.errors import ConfigError, ResidencyError
from moet.vllm import METHOD
from moet.vllm import __file__ as _LIGHT_MODULE


@contextmanager
def offline_engine(
    model: Path,
    settings: Mapping[str, Any],
    window: int,
    options: Mapping[str, Any],
    **own: Any,
) -> Iterator[LLM]:
    """An engine that runs windows of `window` tokens, with moet's `settings`.

    Eager, because workers may look at tokens on the way, and starting it takes less than what
    graphs would save; without prefix caching, because every token must pass.

    Args:
        options: vLLM's engine arguments, as the user gave them. own: those of the caller besides.

    Raises ConfigError for an option that is the command's own.
    """
    needed = {
        "quantization": METHOD,
        "additional_config": {"moet": dict(settings)},
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "skip_tokenizer_init": not (model / "tokenizer.json").exists(),
        "max_model_len": window + 1,
        "max_num_seqs": 1,
        **own,
    }
    clash = sorted(set(needed) & set(options))
    if clash:
        raise ConfigError(f"--engine: {clash[0]!r} is the command's own.", "Leave it out.")
    with _main_not_imported_again():
        llm = LLM(model=str(model), seed=0, **needed, **options)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def prefill(llm: LLM, ids: NDArray[np.int32], window: int, **sampling: Any) -> Any:
    """Runs a window's tokens, int32 [length], as a prompt; returns vLLM's RequestOutput.

    sampling: further `SamplingParams`. Raises ResidencyError naming the window when the step was
    computed without some rows.
    """
    (output,) = llm.generate(
        TokensPrompt(prompt_token_ids=ids.tolist()),
        SamplingParams(temperature=0, max_tokens=1, detokenize=False, **sampling),
        use_tqdm=False,
    )
    if output.outputs[0].finish_reason == "error":
        raise ResidencyError(
            f"window {window}: rows of the experts could not be read; the log says which and why.",
            "Run `moet verify` on the pack, and then this command again.",
        )
    return output


@contextmanager
def _main_not_imported_again() -> Iterator[None]:
    """Keeps spawned processes from importing this process's main module first.

    `moet`'s would import numba, with which vLLM 0.32's CPU worker does not start (`config.py`).
    """
    main = sys.modules["__main__"]
    spec, file = main.__spec__, main.__file__
    try:
        main.__spec__, main.__file__ = None, _LIGHT_MODULE
        yield
    finally:
        main.__spec__, main.__file__ = spec, file
