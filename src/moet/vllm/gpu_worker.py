"""vLLM's GPU worker, whose steps may fail without ending the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.worker.gpu_worker import Worker

from moet.vllm.ahead import LooksAhead
from moet.vllm.failures import StepMark
from moet.vllm.gate.install import HasGate
from moet.vllm.steps import ChecksSteps

if TYPE_CHECKING:
    from moet.vllm.gpu import GPURuntime


class MoetGPUWorker(LooksAhead, HasGate, ChecksSteps, Worker):  # type: ignore[misc]
    """`parallel_config.worker_cls` on a GPU."""

    _moet_serves = False  # warm-up steps are over

    def compile_or_warm_up_model(self) -> Any:
        times = super().compile_or_warm_up_model()
        self._moet_serves = True
        return times

    def execute_model(self, scheduler_output: Any) -> Any:
        if self._moet_serves and scheduler_output.total_num_scheduled_tokens:
            runtime = self._runtime()
            if runtime is not None:
                runtime.begin_step()
        return super().execute_model(scheduler_output)

    def _mark(self) -> StepMark | None:
        runtime = self._runtime()
        return None if runtime is None else runtime.mark()

    def _runtime(self) -> GPURuntime | None:
        from moet.vllm.gpu import GPURuntime  # these import numba: see config.py
        from moet.vllm.method import find_runtime

        found = find_runtime(self.vllm_config)
        runtime = None if found is None else found.seen_through()
        return runtime if isinstance(runtime, GPURuntime) else None
