"""The runtime that records is, for everything else, the runtime that it records."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from moet.kernels import SwiGLU
from moet.vllm.rank import RankExperts
from moet.vllm.recording import RecordingRuntime

OWN = {"experts", "seen_through", "close"}
METHODS = {
    name for name, of in vars(RankExperts).items() if inspect.isfunction(of) and name[0] != "_"
}
PROPERTIES = {name for name, of in vars(RankExperts).items() if isinstance(of, property)}


class Inner:
    """As a runtime; notes what is asked of it, and answers with something of its own."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, tuple[Any, ...]]] = []
        self.answers: dict[str, object] = {}

    def __getattr__(self, name: str) -> Any:
        answer = self.answers.setdefault(name, object())
        if name not in METHODS:
            return answer

        def ask(*arguments: Any) -> object:
            self.asked.append((name, arguments))
            return answer

        return ask


def recording(inner: Inner, **options: Any) -> tuple[RecordingRuntime, list[int]]:
    noted: list[int] = []
    return RecordingRuntime(inner, lambda layer, *_: noted.append(layer), **options), noted  # type: ignore[arg-type]


@pytest.mark.parametrize("name", sorted(METHODS - OWN))
def test_what_is_asked_is_passed_on(name: str) -> None:
    inner = Inner()
    runtime, _ = recording(inner)
    method = getattr(runtime, name)
    arguments = tuple(object() for _ in inspect.signature(method).parameters)
    answer = method(*arguments)
    assert inner.asked == [(name, arguments)]
    if inspect.signature(method).return_annotation != "None":
        assert answer is inner.answers[name]


@pytest.mark.parametrize("name", sorted(PROPERTIES | set(RankExperts.__annotations__)))
def test_what_it_has_is_the_inner_ones(name: str) -> None:
    inner = Inner()
    assert getattr(recording(inner)[0], name) is inner.answers[name]


def test_closing_it_closes_nothing() -> None:
    inner = Inner()
    runtime, _ = recording(inner)
    runtime.close()
    assert inner.asked == []
    assert runtime.seen_through() is inner


@pytest.mark.parametrize(
    ("only", "noted", "computed"), [(None, [1, 2, 3], [1, 2, 3]), (2, [2], [1])]
)
def test_layers_are_noted(only: int | None, noted: list[int], computed: list[int]) -> None:
    inner = Inner()
    runtime, seen = recording(inner, only=only)
    x, ids, weights = torch.ones(4, 8), torch.zeros(4, 2, dtype=torch.int32), torch.ones(4, 2)
    for layer in (1, 2, 3):
        out = runtime.experts(layer, x, ids, weights, None, SwiGLU())
        if layer not in computed:
            assert torch.equal(out, torch.zeros_like(x))
    assert seen == noted
    assert [arguments[0] for _, arguments in inner.asked] == computed
