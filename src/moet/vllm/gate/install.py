"""Putting the gate into a worker's model runner."""

from __future__ import annotations

from typing import Any


class HasGate:
    """Before one of vLLM's worker classes among the bases: its runner has the gate, if there is
    one. Imports late: see `config.py`."""

    vllm_config: Any
    model_runner: Any

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        install(self)


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
    if settings.recovers and not isinstance(runner, GateV1):
        runner.__class__ = type(f"Gated{type(runner).__name__}", (GateV1, type(runner)), {})
    if isinstance(runner, GateV1):
        runner.moet_gate = None if runtime is None else runtime.gate
        runner.moet_prompts_fp4 = settings.prefill_precision == "fp4"
