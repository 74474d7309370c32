"""What is in a pack, as plain data for the command line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moet.checkpoints.base import PROJECTIONS
from moet.formats.layout import Precision
from moet.pack.layer import LayerLayout
from moet.pack.manifest import LayerEntry
from moet.pack.reader import Pack
from moet.quantize.statistics import MatrixStatistics, merge_statistics


@dataclass(frozen=True)
class LayerSummary:
    """One layer; sizes in bytes, of all its experts.

    source_format, source_bytes: of the checkpoint's experts. base_bytes: of the 2-bit rows.
    fp4_bytes: of FP4 rows in the pack, 0 where fp4_stored is "checkpoint".
    statistics: `MatrixStatistics.to_json` of the layer; projections: the same of each.
    """

    layer: int
    mtp: bool
    file: str
    file_bytes: int
    source_format: str
    source_bytes: int
    base_bytes: int
    fp4_precision: Precision
    fp4_stored: str
    fp4_bytes: int
    statistics: dict[str, Any]
    projections: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class PackSummary:
    """A pack; sizes in bytes, of all routed experts.

    calibration: digest of the one that the quantizer used. weights: of all routed experts.
    bf16_bytes: what they would take at two bytes each. pack_bytes: of the layer files. statistics:
    of all weights together.
    """

    path: str
    digest: str
    writer: str
    model: str
    revision: str | None
    source: str
    architecture: str
    quantizer: str
    level: int
    calibration: str | None
    slices: int
    hidden: int
    intermediate: int
    experts: int
    weights: int
    bf16_bytes: int
    source_bytes: int
    base_bytes: int
    fp4_bytes: int
    pack_bytes: int
    statistics: dict[str, Any]
    layers: list[LayerSummary]


def inspect_pack(path: str | Path) -> PackSummary:
    """Opens a pack and sums it up, without reading rows; raises PackError."""
    pack = Pack.open(path)
    manifest, geometry = pack.manifest, pack.manifest.geometry
    layers = [
        _layer(layer.entry, layer.layout, layer.entry.layer in geometry.mtp_layers)
        for layer in pack.layers.values()
    ]
    experts = len(layers) * geometry.num_experts
    weights = experts * len(PROJECTIONS) * geometry.hidden * geometry.intermediate
    total = merge_statistics(part for entry in manifest.layers for part in _parts(entry).values())
    return PackSummary(
        path=str(pack.path),
        digest=pack.digest,
        writer=manifest.writer,
        model=manifest.model.name,
        revision=manifest.model.revision,
        source=manifest.model.source,
        architecture=geometry.architecture,
        quantizer=manifest.quantizer.name,
        level=manifest.quantizer.level,
        calibration=manifest.quantizer.calibration,
        slices=manifest.format.slices,
        hidden=geometry.hidden,
        intermediate=geometry.intermediate,
        experts=experts,
        weights=weights,
        bf16_bytes=2 * weights,
        source_bytes=sum(layer.source_bytes for layer in layers),
        base_bytes=sum(layer.base_bytes for layer in layers),
        fp4_bytes=sum(layer.fp4_bytes for layer in layers),
        pack_bytes=sum(layer.file_bytes for layer in layers),
        statistics=total.to_json(),
        layers=layers,
    )


def _layer(entry: LayerEntry, layout: LayerLayout, mtp: bool) -> LayerSummary:
    parts = _parts(entry)
    return LayerSummary(
        layer=entry.layer,
        mtp=mtp,
        file=entry.file,
        file_bytes=entry.file_bytes,
        source_format=entry.source.format,
        source_bytes=entry.source.bytes,
        base_bytes=layout.experts * layout.base.row_bytes,
        fp4_precision=entry.fp4.precision,
        fp4_stored=entry.fp4.stored,
        fp4_bytes=layout.experts * layout.fp4.row_bytes * layout.fp4_in_pack,
        statistics=merge_statistics(parts.values()).to_json(),
        projections={name: part.to_json() for name, part in parts.items()},
    )


def _parts(entry: LayerEntry) -> dict[str, MatrixStatistics]:
    statistics = entry.statistics
    return {
        "gate": statistics.gate.sums(),
        "up": statistics.up.sums(),
        "down": statistics.down.sums(),
    }
