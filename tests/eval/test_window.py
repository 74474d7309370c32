"""What becomes of a window's answer, from an engine that only says how it went."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.logprobs import FlatLogprobs

from moet.errors import MoetError
from moet.vllm.likeliest import window_likeliest

IDS = np.array([7, 3, 5], np.int32)
LOGPROBS = [-2.0, -0.5, -1.0, -0.25, -0.25, -3.0]  # the token that follows, then two likely ones


class Engine:
    def __init__(self, reason: str = "length", logprobs: list[float] = LOGPROBS) -> None:
        self.reason = reason
        self.told = FlatLogprobs([0, 0, 3], [0, 3, 6], [3, 9, 8, 5, 5, 2], logprobs)

    def generate(self, prompt: Any, sampling: Any, **options: Any) -> list[Any]:
        assert prompt["prompt_token_ids"] == IDS.tolist()
        assert (sampling.prompt_logprobs, sampling.max_tokens) == (2, 1)
        outputs = [SimpleNamespace(finish_reason=self.reason)]
        return [SimpleNamespace(outputs=outputs, prompt_logprobs=self.told)]


def test_every_token_but_the_first_is_predicted() -> None:
    found = window_likeliest(Engine(), IDS, 4, 2)  # type: ignore[arg-type]
    assert found.ids.tolist() == [[3, 9, 8], [5, 5, 2]]
    assert found.nll.tolist() == [2.0, 0.25]


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (Engine(reason="error"), "window 4: rows of the experts could not be read"),
        (Engine(logprobs=[float("nan")] * 6), "window 4: .* not all finite"),
    ],
)
def test_a_window_that_went_wrong_is_no_number(engine: Engine, message: str) -> None:
    with pytest.raises(MoetError, match=message):
        window_likeliest(engine, IDS, 4, 2)  # type: ignore[arg-type]
