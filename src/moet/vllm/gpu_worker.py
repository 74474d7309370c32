"""vLLM's GPU worker, whose steps may fail without ending the engine."""

from __future__ import annotations

from vllm.v1.worker.gpu_worker import Worker

from moet.vllm.failures import StepMark
from moet.vllm.gate.install import HasGate
from moet.vllm.steps import ChecksSteps


class MoetGPUWorker(HasGate, ChecksSteps, Worker):  # type: ignore[misc]
    """`parallel_config.worker_cls` on a GPU."""

    def _mark(self) -> StepMark | None:
        from moet.vllm.gpu import GPURuntime  # these import numba: see config.py
        from moet.vllm.method import find_runtime

        runtime = find_runtime(self.vllm_config)
        return runtime.mark() if isinstance(runtime, GPURuntime) else None
