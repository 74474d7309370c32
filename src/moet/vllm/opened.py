"""A rank's rows, opened: those of the model's pack, or random ones for `--load-format dummy`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PretrainedConfig
from vllm.logger import init_logger

from moet.checkpoints import Checkpoint, family_of
from moet.checkpoints.base import Geometry
from moet.errors import PackError
from moet.formats.layout import Precision
from moet.pack import Pack, PackRowSource, RowSource, verify_pack
from moet.pack.dummy import DummyRowSource
from moet.settings import Settings
from moet.vllm.model import checkpoint_path, open_pack
from moet.vllm.precision import fp4_experts

logger = init_logger(f"vllm.{__name__}")  # vLLM shows its own loggers only


@dataclass(frozen=True)
class OpenedRows:
    """What a rank serves.

    precision: of every expert, by layer: those of the target model that the rank computes, and of
    its draft. fp4: which kind of FP4 rows there are, by layer. about: where rows come from, for the
    log.
    """

    geometry: Geometry
    source: RowSource
    precision: Mapping[int, Sequence[Precision]]
    fp4: Mapping[int, Precision]
    about: str


def open_rows(
    vllm_config: Any, settings: Settings, layers: Sequence[int], tp_rank: int, tp_size: int
) -> OpenedRows:
    """Opens what a rank serves.

    Args:
        layers: the MoE layers of the target model that this rank computes; those of the draft head
            are added here if vLLM speculates with it.

    Raises a MoetError for every way in which settings, pack and model do not fit together.
    """
    if vllm_config.load_config.load_format == "dummy":
        return _dummy(vllm_config, settings, layers, tp_size)
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
        experts = fp4_experts(settings.precision, geometry, checkpoint.identity, pack.path)
    layers = _with_draft(vllm_config, layers, geometry)
    for layer in layers:
        if layer not in experts or layer not in pack.layers:
            raise PackError(
                f"{pack.path}: has no experts of layer {layer}, which the model has.",
                "Make it again with `moet pack`.",
            )
    fp4 = {layer: pack.layers[layer].layout.fp4.precision for layer in layers}
    quantizer = pack.manifest.quantizer
    about = f"{pack.path} ({quantizer.name}, level {quantizer.level})"
    return OpenedRows(geometry, source, _precisions(experts, fp4), fp4, about)


def _dummy(vllm_config: Any, settings: Settings, layers: Sequence[int], tp_size: int) -> OpenedRows:
    geometry = geometry_of_config(vllm_config)
    source = DummyRowSource(geometry, tp_size, settings.pack, settings.direct_io)
    fp4 = dict.fromkeys(_with_draft(vllm_config, layers, geometry), Precision.MXFP4)
    experts = fp4_experts(settings.precision, geometry, "")
    where = "memory" if settings.pack is None else str(settings.pack)
    return OpenedRows(geometry, source, _precisions(experts, fp4), fp4, f"random rows from {where}")


def geometry_of_config(vllm_config: Any) -> Geometry:
    """The experts' geometry by the model's config alone."""
    model = vllm_config.model_config
    # As it stands in the file: transformers renames keys.
    config, _ = PretrainedConfig.get_config_dict(model.model, revision=model.revision)
    return family_of(config).geometry(config)


def _with_draft(vllm_config: Any, layers: Sequence[int], geometry: Geometry) -> list[int]:
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method in ("mtp", "dspark"):
        return [*layers, *geometry.mtp_layers]
    return list(layers)


def _precisions(
    experts: Mapping[int, NDArray[np.bool_]], fp4: Mapping[int, Precision]
) -> dict[int, list[Precision]]:
    return {
        layer: [high if wanted else Precision.BASE for wanted in experts[layer]]
        for layer, high in fp4.items()
    }


def _verify(pack: Pack, checkpoint: Checkpoint) -> None:
    logger.info("moet: verifying %s before it is served.", pack.path)
    problems = verify_pack(pack.path, checkpoint=checkpoint)
    if problems:
        first = problems[0]
        raise PackError(
            f"{first.file}: {first.reason} ({len(problems)} problems in all).",
            f"Run `moet verify {pack.path}` to see them, and copy or make the pack again.",
        )
