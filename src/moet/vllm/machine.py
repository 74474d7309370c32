"""The machine that a model is served on, for result files."""

from __future__ import annotations

from typing import Any

from moet.bench.results import environment


def machine(ranks: int) -> dict[str, Any]:
    """As `environment`, and "gpu", where vLLM runs on GPUs, of which each rank has one."""
    from vllm.platforms import current_platform  # vLLM takes seconds to import

    found = environment()
    if current_platform.is_cuda():
        name = current_platform.get_device_name()
        found["gpu"] = name if ranks == 1 else f"{ranks} × {name}"
    return found
