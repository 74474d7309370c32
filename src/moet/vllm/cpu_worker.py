"""vLLM's CPU worker, whose steps may fail without ending the engine."""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker

from moet.vllm.ahead import LooksAhead
from moet.vllm.failures import StepMark
from moet.vllm.gate.install import HasGate
from moet.vllm.steps import ChecksSteps


class _Known(StepMark):
    """A CPU step has ended when its output is there: so the failure is known."""

    def __init__(self, error: Exception) -> None:
        self._error = str(error)

    def error(self) -> str:
        return self._error


class MoetCPUWorker(LooksAhead, HasGate, ChecksSteps, CPUWorker):  # type: ignore[misc]
    """`parallel_config.worker_cls` on the CPU."""

    def _mark(self) -> StepMark | None:
        from moet.vllm.method import moet_methods  # imports numba: see config.py

        failures = [method.take_failure() for method in moet_methods(self.vllm_config)]
        first = next((failure for failure in failures if failure is not None), None)
        return None if first is None else _Known(first)
