"""What our workers do beyond vLLM's: each step's output is checked for a failure."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from moet.vllm.failures import StepMark, checked


class ChecksSteps:
    """Before one of vLLM's worker classes among the bases."""

    vllm_config: Any

    @abstractmethod
    def _mark(self) -> StepMark | None:
        """A mark behind the step whose work has just been given to the device; None if no step
        can fail."""

    def execute_model(self, scheduler_output: Any) -> Any:
        return self._checked(super().execute_model(scheduler_output))  # type: ignore[misc]

    def sample_tokens(self, grammar_output: Any) -> Any:
        return self._checked(super().sample_tokens(grammar_output))  # type: ignore[misc]

    def _checked(self, output: Any) -> Any:
        # None: the step goes on in `sample_tokens`.
        mark = None if output is None else self._mark()
        return output if mark is None else checked(output, mark)
