"""One rank's experts at run time: a residency manager, an operator, and what ties them to vLLM.

There is one runtime a rank, for the target model and its draft. It is found through the layers that
vLLM itself keeps by name (`static_forward_context`), so nothing here is global: the first layer
whose weights are processed makes it, the others take it from that layer.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.distributed import get_world_group
from vllm.logger import init_logger

from moet.checkpoints import Checkpoint
from moet.checkpoints.base import Geometry
from moet.errors import ConfigError, PackError
from moet.formats.layout import Precision
from moet.kernels import CpuExperts, ExpertRows, ExpertsOperator, SwiGLU, make_operator
from moet.pack import Pack, PackRowSource, verify_pack
from moet.residency.manager import ResidencyManager
from moet.settings import Settings
from moet.vllm.model import checkpoint_path, open_pack
from moet.vllm.pools import size_pools
from moet.vllm.precision import fp4_experts
from moet.vllm.stats import describe, rank_stats

logger = init_logger(f"vllm.{__name__}")  # vLLM shows its own loggers only

_LOG_EVERY = 60.0  # seconds between two lines of statistics, while there is work


@dataclass
class Runtime:
    """What every layer of a rank shares.

    geometry: of the model. manager: of the rank's rows. source: they come from there.
    precision: of every expert, by layer. operator: computes. decode_length: the most tokens of one
    request in a decode step. tp_size: ranks that a row is cut for.
    """

    geometry: Geometry
    manager: ResidencyManager
    source: PackRowSource
    precision: Mapping[int, Sequence[Precision]]
    operator: ExpertsOperator
    decode_length: int
    tp_size: int

    def __post_init__(self) -> None:
        self._factors = {
            layer: _factors(self.source, layer, of) for layer, of in self.precision.items()
        }
        self._logged = time.monotonic()
        weakref.finalize(self, _close, self.manager, self.source)

    def check_layer(self, layer: int, experts: int, hidden: int, intermediate: int) -> None:
        """Raises PackError unless the pack's rows are those of a layer that vLLM has made."""
        g = self.geometry
        if layer not in self.precision:
            raise PackError(
                f"the pack has no experts of layer {layer}, which the model has.",
                "Make it again with `moet pack`.",
            )
        if (experts, hidden, intermediate) != (g.num_experts, g.hidden, g.intermediate):
            raise PackError(
                f"layer {layer} has {experts} experts of {hidden} × {intermediate}, the pack "
                f"{g.num_experts} of {g.hidden} × {g.intermediate}.",
                "Make it again with `moet pack`.",
            )

    def experts(
        self,
        layer: int,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        decode: NDArray[np.bool_],
        activation: SwiGLU,
    ) -> Tensor:
        """The rank's part of a layer's routed experts: [T, hidden] in x's dtype.

        x: [T, hidden] float32 or bfloat16. topk_ids: int32 [T, k], −1 = none. topk_weights:
        float32 [T, k]. decode: [T], the tokens of requests that decode.
        """
        x, ids = x.contiguous(), topk_ids.to(torch.int32).contiguous()
        weights = topk_weights.to(torch.float32).contiguous()
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        needed = ids.cpu().numpy()
        factors, layouts = self._factors[layer], self.source.layouts
        with self.manager.lease(
            layer, decode=_unique(needed[decode]), scan=_unique(needed[~decode])
        ) as lease:
            for wave in lease:
                rows = ExpertRows(
                    wave.experts, wave.address, wave.precision, factors[wave.experts], layouts
                )
                self.operator.accumulate(x, ids, weights, rows, activation, out)
        self._log()
        return out.to(x.dtype)

    def stats(self) -> dict[str, Any]:
        """The rank's statistics as plain values (`stats.rank_stats`)."""
        return rank_stats(self.manager.metrics())

    def _log(self) -> None:
        now = time.monotonic()
        if now - self._logged >= _LOG_EVERY:
            self._logged = now
            logger.info("moet: %s", describe(self.manager.metrics()))


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
        fp4 = fp4_experts(settings.precision, geometry, checkpoint.identity)
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method == "mtp":
        layers = [*layers, *geometry.mtp_layers]
    precision = {layer: _precisions(pack, layer, fp4[layer]) for layer in layers}
    sizings = size_pools(settings, precision, source.layouts, vllm_config)
    manager = ResidencyManager(
        source,
        precision,
        {p: sizing.slots for p, sizing in sizings.items()},
        streaming=settings.streaming_slots,
        policy=settings.policy,
        io_threads=settings.io_threads,
        heat_path=_heat_path(settings),
        progress=_progress(),
    )
    operator = _operator(settings)
    if tp_rank == 0:
        _summarize(pack, settings, operator.name, precision, [of.reason for of in sizings.values()])
    decode_length = 1 + (speculative.num_speculative_tokens if speculative is not None else 0)
    return Runtime(geometry, manager, source, precision, operator, decode_length, tp_size)


def _operator(settings: Settings) -> ExpertsOperator:
    if settings.operator not in ("auto", CpuExperts.name):
        return make_operator(settings.operator)
    operator = CpuExperts(threads=settings.threads)
    operator.warm_up()  # compiling takes seconds; not in the first request
    return operator


def _precisions(pack: Pack, layer: int, fp4: NDArray[np.bool_]) -> list[Precision]:
    if layer not in pack.layers:
        raise PackError(
            f"{pack.path}: has no experts of layer {layer}, which the model has.",
            "Make it again with `moet pack`.",
        )
    high = pack.layers[layer].layout.fp4.precision
    return [high if wanted else Precision.BASE for wanted in fp4]


def _factors(
    source: PackRowSource, layer: int, precision: Sequence[Precision]
) -> NDArray[np.float32]:
    """float32 [experts, 3]: the factors of each expert at its precision."""
    tables = {p: source.factors(layer, p) for p in set(precision)}
    return np.stack([tables[p][expert] for expert, p in enumerate(precision)])


def _unique(ids: NDArray[np.int32]) -> NDArray[np.int64]:
    found = np.unique(ids).astype(np.int64)
    return found[found >= 0]


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
    precision: Mapping[int, Sequence[Precision]],
    reasons: list[str],
) -> None:
    quantizer = pack.manifest.quantizer
    counts = {p: sum(list(of).count(p) for of in precision.values()) for p in Precision}
    experts = ", ".join(f"{count} {p}" for p, count in counts.items() if count)
    lines = [
        f"pack       {pack.path} ({quantizer.name}, level {quantizer.level})",
        f"precision  {settings.precision}: {experts} rows in {len(precision)} layers",
        *(f"pool       {reason}" for reason in reasons),
        f"policy     {settings.policy}, {settings.streaming_slots} streaming slots a pool",
        f"operator   {operator}",
    ]
    logger.info("moet serves the routed experts:\n  %s", "\n  ".join(lines))


def _close(manager: ResidencyManager, source: PackRowSource) -> None:
    manager.close()
    source.close()
