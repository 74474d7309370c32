"""Putting the gate into a worker's model runner."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any


class HasGate:
    """Before one of vLLM's worker classes among the bases: its runner has the gate, if there is
    one. Imports late: see `config.py`."""

    vllm_config: Any
    model_runner: Any

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        install(self)

    def compile_or_warm_up_model(self) -> Any:
        """vLLM's warm-up requests go through the second pass, too: a kernel that is loaded when the
        first real one comes could wait for a step that waits for rows."""
        gate = getattr(self.model_runner, "moet_gate", None)
        with nullcontext() if gate is None else gate.rehearsal():
            return super().compile_or_warm_up_model()  # type: ignore[misc]


def install(worker: Any) -> None:
    """Makes the runner of a worker whose model is loaded decide tokens again.

    Nothing happens where neither the gate nor prompts at FP4 were asked for.
    """
    from moet.settings import Settings
    from moet.vllm.gate.v1 import GateV1
    from moet.vllm.method import find_runtime

    settings = Settings.from_additional_config(worker.vllm_config.additional_config)
    runtime = find_runtime(worker.vllm_config)
    runner = worker.model_runner
    kind: type[Any] = GateV1
    if worker.use_v2_model_runner:
        from moet.vllm.gate.v2 import GateV2 as kind  # noqa: N813 - its module needs Triton
    if settings.recovers and not isinstance(runner, kind):
        runner.__class__ = type(f"Gated{type(runner).__name__}", (kind, type(runner)), {})
        if worker.use_v2_model_runner:
            runner.moet_attach()
    if isinstance(runner, kind):
        runner.moet_runtime = runtime
        runner.moet_gate = None if runtime is None else runtime.gate
        runner.moet_prompts_fp4 = settings.prefill_precision == "fp4"
