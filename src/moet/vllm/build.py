"""Making a rank's runtime: the rows opened, pools sized and filled, the operator compiled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.logger import init_logger
from vllm.platforms import current_platform

from moet.formats.layout import Precision
from moet.kernels import CpuExperts, ExpertsOperator, make_operator
from moet.settings import Settings
from moet.vllm.gate.gate import Gate
from moet.vllm.opened import OpenedRows, open_rows
from moet.vllm.phase import longest_decode
from moet.vllm.pools import all_rows, make_manager, rank_file
from moet.vllm.progress import LoadingProgress
from moet.vllm.rank import RankExperts
from moet.vllm.runtime import Runtime

logger = init_logger(f"vllm.{__name__}")  # vLLM shows its own loggers only


def build_runtime(
    vllm_config: Any, layers: Sequence[int], tp_rank: int, tp_size: int
) -> RankExperts:
    """Opens the model's pack and fills memory.

    Args:
        layers: the MoE layers of the target model that this rank computes; those of the draft head
            are added here if vLLM speculates with it.

    Raises a MoetError for every way in which settings, pack and model do not fit together.
    """
    settings = Settings.from_additional_config(vllm_config.additional_config)
    gpu = current_platform.is_cuda()
    if tp_rank == 0:
        _warn_of_ignored(settings, gpu)
    opened = open_rows(vllm_config, settings, layers, tp_rank, tp_size)
    if gpu:
        from moet.vllm.gpu_build import build_gpu_runtime  # needs CUDA's packages

        heat_path = rank_file("heat_file", settings.heat_file)
        return build_gpu_runtime(vllm_config, settings, opened, heat_path, tp_rank == 0)
    return _build(vllm_config, settings, opened, tp_rank == 0)


def _build(vllm_config: Any, settings: Settings, opened: OpenedRows, verbose: bool) -> Runtime:
    source, precision = opened.source, opened.precision
    recovery = opened.fp4 if settings.recovers or settings.adaptive else {}
    manager, reasons = make_manager(
        settings,
        source,
        precision,
        vllm_config,
        recovery=recovery,
        heat_path=rank_file("heat_file", settings.heat_file),
        progress=LoadingProgress(),
    )
    operator = _operator(settings)
    if verbose:
        lines = [
            f"rows       {opened.about}",
            f"precision  {settings.precision}: {counted(all_rows(precision, recovery))}",
            *(f"pool       {reason}" for reason in reasons),
            f"policy     {settings.pool_policy}, {settings.pool_streaming} streaming slots a pool",
            f"operator   {operator.name}",
        ]
        logger.info("moet serves the routed experts:\n  %s", "\n  ".join(lines))
    return Runtime(
        opened.geometry,
        manager,
        source,
        precision,
        operator,
        longest_decode(vllm_config),
        recovery=recovery,
        gate=None if settings.gate is None else Gate(settings.gate.tau, settings.gate.cap),
    )


def counted(rows: Mapping[int, Sequence[Precision]]) -> str:
    """How many rows of which precision there are."""
    counts = {p: sum(list(of).count(p) for of in rows.values()) for p in Precision}
    experts = ", ".join(f"{count} {p}" for p, count in counts.items() if count)
    return f"{experts} rows in {len(rows)} layers"


def _warn_of_ignored(settings: Settings, gpu: bool) -> None:
    """Not an error: one recipe may serve on several machines."""
    where, other = ("on a GPU", "the CPU") if gpu else ("without a GPU", "a GPU")
    for name in settings.ignored(gpu=gpu):
        logger.warning(
            "moet: the setting %s has no effect %s; it is for serving on %s.", name, where, other
        )


def _operator(settings: Settings) -> ExpertsOperator:
    if settings.operator not in ("auto", CpuExperts.name):
        return make_operator(settings.operator)
    operator = CpuExperts(threads=settings.threads)
    operator.warm_up()  # compiling takes seconds; not in the first request
    return operator
