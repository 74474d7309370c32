"""vLLM's configuration while it is being made: whose it is, and which classes of ours it names.

Imports nothing that process 0 may not have (see `config.py`).
"""

from __future__ import annotations

import inspect

from vllm.config import VllmConfig
from vllm.platforms import current_platform

_WORKERS = {
    "cpu": ("vllm.v1.worker.cpu_worker.CPUWorker", "moet.vllm.cpu_worker.MoetCPUWorker"),
    "cuda": ("vllm.v1.worker.gpu_worker.Worker", "moet.vllm.gpu_worker.MoetGPUWorker"),
}
_SCHEDULER = "moet.vllm.scheduler.make_scheduler"


def config_under_construction() -> VllmConfig | None:
    """The VllmConfig that is making the quantization config, as seen from one of its hooks.

    vLLM hands the hook the model's part only, and the rest to no plugin before the workers. So this
    looks up the call stack; where it finds nothing, the workers check instead.
    """
    frame = inspect.currentframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, VllmConfig):
            return owner
        frame = frame.f_back
    return None


def name_classes(vllm_config: VllmConfig) -> None:
    """Makes vLLM use our worker and scheduler, where the user has not named others.

    They end the requests of a step whose experts could not be read, where vLLM's would end the
    server.
    """
    parallel = vllm_config.parallel_config
    own, ours = _WORKERS.get(current_platform.device_type, ("", "auto"))
    if parallel.worker_cls in ("auto", own):
        parallel.worker_cls = ours
    if vllm_config.scheduler_config.scheduler_cls is None:
        vllm_config.scheduler_config.scheduler_cls = _SCHEDULER


def ends_failed_steps(vllm_config: VllmConfig) -> bool:
    """Whether a step that failed ends its requests alone: all classes are ours, and the rank that
    sees the failure is the one whose output counts."""
    parallel = vllm_config.parallel_config
    _, ours = _WORKERS.get(current_platform.device_type, ("", ""))
    return (
        parallel.worker_cls == ours
        and vllm_config.scheduler_config.scheduler_cls == _SCHEDULER
        and parallel.pipeline_parallel_size == 1
        and (parallel.tensor_parallel_size == 1 or not current_platform.is_cpu())
    )
