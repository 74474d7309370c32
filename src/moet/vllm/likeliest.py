"""What a served model says of the next token, at every position of windows of text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm import LLM

from moet.errors import ConfigError
from moet.eval.likeliest import Likeliest
from moet.vllm.offline import offline_engine, prefill


def likeliest(
    model: Path,
    settings: Mapping[str, Any],
    windows: NDArray[np.int32],
    options: Mapping[str, Any],
    top: int,
    progress: Callable[[int], None],
) -> list[Likeliest]:
    """Runs `windows`, int32 [windows, length], through an engine of its own.

    Args:
        settings, options: as of `offline_engine`. top: how many tokens to ask for at a position.
        progress: called with windows done, after each.

    Raises what `offline_engine` and `prefill` raise, and ConfigError for log-probabilities that
    are not finite.
    """
    own = {"max_logprobs": top, "logprobs_mode": "raw_logprobs"}
    found = []
    with offline_engine(model, settings, windows.shape[1], options, **own) as llm:
        for index, ids in enumerate(windows):
            found.append(window_likeliest(llm, ids, index, top))
            progress(index + 1)
    return found


def window_likeliest(llm: LLM, ids: NDArray[np.int32], index: int, top: int) -> Likeliest:
    """One window, int32 [length]: of every token but the first."""
    given = prefill(llm, ids, index, prompt_logprobs=top, flat_logprobs=True).prompt_logprobs
    # vLLM's form of a position: the token that follows, then the most likely, in order.
    shape = (len(ids) - 1, 1 + top)
    logprobs = np.array(given.logprobs, np.float64).reshape(shape)
    if not np.isfinite(logprobs).all():
        raise ConfigError(
            f"window {index}: the model's log-probabilities are not all finite.",
            'Run it in a dtype that holds its activations: --engine \'{"dtype": "bfloat16"}\'.',
        )
    return Likeliest(np.array(given.token_ids, np.int32).reshape(shape), logprobs)
