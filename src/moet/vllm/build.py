"""Making a rank's runtime: the pack opened, pools sized and filled, the operator compiled."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.distributed import get_world_group
from vllm.logger import init_logger

from moet.checkpoints import Checkpoint
from moet.errors import ConfigError, PackError
from moet.formats.layout import Precision
from moet.kernels import CpuExperts, ExpertsOperator, make_operator
from moet.pack import Pack, PackRowSource, verify_pack
from moet.residency.manager import ResidencyManager
from moet.settings import Settings
from moet.vllm.gate.gate import Gate
from moet.vllm.model import checkpoint_path, open_pack
from moet.vllm.pools import size_pools
from moet.vllm.precision import fp4_experts
from moet.vllm.runtime import Runtime

logger = init_logger(f"vllm.{__name__}")  # vLLM shows its own loggers only


def build_runtime(vllm_config: Any, layers: Sequence[int], tp_rank: int, tp_size: int) -> Runtime:
    """Opens the model's pack and fills the pools.

    Args:
        layers: the MoE layers of the target model that this rank computes; those of the draft head
            are added here if vLLM speculates with it.

    Raises a MoetError for every way in which settings, pack and model do not fit together.
    """
    settings = Settings.from_additional_config(vllm_config.additional_config)
    with Checkpoint.open(checkpoint_path(vllm_config)) as checkpoint:
        geometry = checkpoint.geometry
        pack = open_pack(settings, checkpoint)
        if settings.verify == "open" and tp_rank == 0:
            _verify(pack, checkpoint)
        source = PackRowSource(
            pack,
            checkpoint,
            tp_rank=tp_rank,
            tp_size=tp_size,
            direct_io=settings.direct_io,
            verify=settings.verify == "read",
        )
        fp4 = fp4_experts(settings.precision, geometry, checkpoint.identity, pack.path)
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method in ("mtp", "dspark"):
        layers = [*layers, *geometry.mtp_layers]
    precision = {layer: _precisions(pack, layer, fp4.get(layer)) for layer in layers}
    recovery = _recovery(pack, precision) if settings.recovers else {}
    rows = {layer: [*of, *_others(of, recovery.get(layer))] for layer, of in precision.items()}
    sizings = size_pools(settings, rows, source.layouts, vllm_config)
    manager = ResidencyManager(
        source,
        precision,
        {p: sizing.slots for p, sizing in sizings.items()},
        recovery=recovery or None,
        streaming=settings.pool_streaming,
        policy=settings.pool_policy,
        io_threads=settings.io_threads,
        heat_path=_heat_path(settings),
        progress=_progress(),
    )
    operator = _operator(settings)
    if tp_rank == 0:
        _summarize(pack, settings, operator.name, rows, [of.reason for of in sizings.values()])
    decode_length = 1 + (speculative.num_speculative_tokens if speculative is not None else 0)
    return Runtime(
        geometry,
        manager,
        source,
        precision,
        operator,
        decode_length,
        recovery=recovery,
        gate=None if settings.gate is None else Gate(settings.gate.tau, settings.gate.cap),
    )


def _operator(settings: Settings) -> ExpertsOperator:
    if settings.operator not in ("auto", CpuExperts.name):
        return make_operator(settings.operator)
    operator = CpuExperts(threads=settings.threads)
    operator.warm_up()  # compiling takes seconds; not in the first request
    return operator


def _precisions(pack: Pack, layer: int, fp4: NDArray[np.bool_] | None) -> list[Precision]:
    if fp4 is None or layer not in pack.layers:
        raise PackError(
            f"{pack.path}: has no experts of layer {layer}, which the model has.",
            "Make it again with `moet pack`.",
        )
    high = pack.layers[layer].layout.fp4.precision
    return [high if wanted else Precision.BASE for wanted in fp4]


def _recovery(pack: Pack, layers: Iterable[int]) -> dict[int, Precision]:
    """The precision at which tokens are decided again, by layer."""
    return {layer: pack.layers[layer].layout.fp4.precision for layer in layers}


def _others(precision: Sequence[Precision], recovery: Precision | None) -> list[Precision]:
    """The rows that a layer needs for recovery besides those that it has anyway."""
    return [recovery for own in precision if recovery not in (None, own)]


def _verify(pack: Pack, checkpoint: Checkpoint) -> None:
    logger.info("moet: verifying %s before it is served.", pack.path)
    problems = verify_pack(pack.path, checkpoint=checkpoint)
    if problems:
        first = problems[0]
        raise PackError(
            f"{first.file}: {first.reason} ({len(problems)} problems in all).",
            f"Run `moet verify {pack.path}` to see them, and copy or make the pack again.",
        )


def _heat_path(settings: Settings) -> Path | None:
    """The heat file of this rank: ranks of a pipeline have other layers, and none may share one."""
    path = settings.heat_file
    if path is None:
        return None
    if not path.parent.is_dir():
        raise ConfigError(
            f"heat_file {path}: there is no directory {path.parent}.", "Make it, or name another."
        )
    rank = get_world_group().rank
    return path if rank == 0 else path.with_name(f"{path.name}.{rank}")


def _progress() -> Callable[[int, int], None]:
    """Logs how far the filling of the pools is, every ten seconds."""
    last = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= 10:
            last = time.monotonic()
            logger.info("moet: %d of %d rows are in memory.", done, total)

    return report


def _summarize(
    pack: Pack,
    settings: Settings,
    operator: str,
    rows: Mapping[int, Sequence[Precision]],
    reasons: list[str],
) -> None:
    quantizer = pack.manifest.quantizer
    counts = {p: sum(list(of).count(p) for of in rows.values()) for p in Precision}
    experts = ", ".join(f"{count} {p}" for p, count in counts.items() if count)
    lines = [
        f"pack       {pack.path} ({quantizer.name}, level {quantizer.level})",
        f"precision  {settings.precision}: {experts} rows in {len(rows)} layers",
        *(f"pool       {reason}" for reason in reasons),
        f"policy     {settings.pool_policy}, {settings.pool_streaming} streaming slots a pool",
        f"operator   {operator}",
    ]
    logger.info("moet serves the routed experts:\n  %s", "\n  ".join(lines))
