"""What a window of a calibration must have been, on an engine that only says how it went."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moet.calibrate import Windows
from moet.errors import MoetError
from moet.vllm.collect import run_window

WINDOWS = Windows(np.arange(8, dtype=np.int32).reshape(2, 4))


class Engine:
    """Ends each request with `reason`, after its layers saw so many tokens."""

    def __init__(self, reason: str = "length", seen: int = 4, broken: tuple[int, ...] = ()) -> None:
        self.answer = {"seen": {1: seen, 2: seen}, "broken": list(broken)}
        self.reason = reason
        self.ran: list[list[int]] = []

    def collective_rpc(self, name: str, args: tuple[Any, ...]) -> list[Any]:
        return [self.answer if name == "moet_window_seen" else None]

    def generate(self, prompt: Any, *args: Any, **kwargs: Any) -> list[Any]:
        self.ran.append(prompt["prompt_token_ids"])
        return [SimpleNamespace(outputs=[SimpleNamespace(finish_reason=self.reason)])]


def run(engine: Engine) -> None:
    run_window(engine, WINDOWS, 1, (1, 2), sync=True)  # type: ignore[arg-type]


def test_a_window_runs_whole() -> None:
    engine = Engine()
    run(engine)
    assert engine.ran == [[4, 5, 6, 7]]


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (Engine(reason="error"), "window 1: rows of the experts could not be read"),
        (Engine(seen=3), "window 1: layer 1 saw 3 of 4 tokens"),
        (Engine(broken=(2,)), "window 1: the inputs of layer 2 are not all finite"),
    ],
)
def test_a_window_that_went_wrong_is_no_sample(engine: Engine, message: str) -> None:
    with pytest.raises(MoetError, match=message):
        run(engine)
