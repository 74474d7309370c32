"""A step that failed: how a worker says so, so that its requests end and the server lives on.

vLLM ends the engine when a worker raises. So a step whose experts could not be read is computed to
its end on whatever is there, its output is marked, and the scheduler (`scheduler.py`) ends its
requests with an error.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any

from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput


@dataclass
class FailedStep(ModelRunnerOutput):  # type: ignore[misc]
    """What a step gave, of which nothing may be used. error: why, for the log."""

    error: str = ""

    @classmethod
    def of(cls, output: ModelRunnerOutput, error: str) -> FailedStep:
        return cls(**{f.name: getattr(output, f.name) for f in fields(output)}, error=error)


class StepMark(ABC):
    """The end of a step's work, as it was given to the device."""

    @abstractmethod
    def error(self) -> str | None:
        """Why the step failed; None if it did not. Asked for when the step's output is there."""


class CheckedOutput(AsyncModelRunnerOutput):  # type: ignore[misc]
    """An output that is still on its way, and the mark that was set behind its step."""

    def __init__(self, output: AsyncModelRunnerOutput, mark: StepMark) -> None:
        self._output, self._mark = output, mark

    def get_output(self) -> ModelRunnerOutput:
        return _checked(self._output.get_output(), self._mark)


def checked(output: Any, mark: StepMark) -> Any:
    """A worker's output, marked as failed if the step was."""
    if isinstance(output, AsyncModelRunnerOutput):
        return CheckedOutput(output, mark)
    return _checked(output, mark) if isinstance(output, ModelRunnerOutput) else output


def _checked(output: ModelRunnerOutput, mark: StepMark) -> ModelRunnerOutput:
    error = mark.error()
    return output if error is None else FailedStep.of(output, error)
