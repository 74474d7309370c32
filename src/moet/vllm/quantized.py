"""A runtime for the finished layers of a pack that is still being written."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moet.checkpoints import Checkpoint
from moet.errors import PackError
from moet.formats.layout import Precision
from moet.pack import Pack, PackRowSource
from moet.pack.manifest import LayerEntry, Recipe
from moet.pack.reader import open_layer
from moet.pack.workspace import JOURNAL_NAME
from moet.settings import Settings
from moet.vllm.model import checkpoint_path, open_pack
from moet.vllm.pools import make_manager
from moet.vllm.runtime import Runtime


def quantized_runtime(
    vllm_config: Any,
    partial: Path,
    layers: Sequence[int],
    old: Runtime,
    tp_rank: int,
    tp_size: int,
) -> Runtime:
    """Serves `layers` at 2 bits from the unfinished pack `partial`; takes `old`'s operator.

    `old` is closed first, so that memory never holds the rows of both.
    Raises PackError unless each of the layers is finished there.
    """
    settings = Settings.from_additional_config(vllm_config.additional_config)
    with Checkpoint.open(checkpoint_path(vllm_config)) as checkpoint:
        pack = with_finished_layers(open_pack(settings, checkpoint), partial, layers)
        source = PackRowSource(
            pack,
            checkpoint,
            tp_rank=tp_rank,
            tp_size=tp_size,
            direct_io=settings.direct_io,
            verify=True,
        )
    old.manager.close()
    precision = {layer: [Precision.BASE] * old.geometry.num_experts for layer in layers}
    manager, _ = make_manager(settings, source, precision, vllm_config)
    return dataclasses.replace(old, manager=manager, source=source, precision=precision)


def with_finished_layers(pack: Pack, partial: Path, layers: Sequence[int]) -> Pack:
    """`pack` with `layers` taken from an unfinished pack of the same model and slices."""
    first, *lines = (partial / JOURNAL_NAME).read_bytes().split(b"\n")[:-1]
    slices = Recipe.model_validate_json(first).format.slices
    if slices != pack.manifest.format.slices:
        raise PackError(
            f"{pack.path}: has {pack.manifest.format.slices} slices, the pack that is being made "
            f"{slices}.",
            f"Level 3 needs a pack with as many: --slices {pack.manifest.format.slices}.",
        )
    entries = {
        entry.layer: entry for line in lines for entry in (LayerEntry.model_validate_json(line),)
    }
    missing = sorted(set(layers) - set(entries))
    if missing:
        raise PackError(f"{partial}: layer {missing[0]} is not finished, though later ones begin.")
    finished = {layer: open_layer(partial, pack.manifest, entries[layer]) for layer in layers}
    return dataclasses.replace(pack, layers={**pack.layers, **finished})
