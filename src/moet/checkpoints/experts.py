"""Which tensors are whose: the routed experts of a checkpoint, matched to their storage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from moet.checkpoints.base import PROJECTIONS, Family, Geometry, Projection, TensorRef
from moet.checkpoints.storage import Storage
from moet.errors import CheckpointError

Located = dict[Projection, dict[str, TensorRef]]


@dataclass(frozen=True)
class LayerExperts:
    """A layer's experts: how they are stored, and where each one's parts are."""

    storage: Storage
    located: tuple[Located, ...]


def match_experts(
    family: Family, geometry: Geometry, tensors: Mapping[str, TensorRef], declared: str
) -> tuple[Geometry, dict[int, LayerExperts]]:
    """Finds every part of every expert, and checks dtypes and shapes.

    declared: the format that the configs declare (`Family.declared_format`). A layer is stored in
    its form or, as draft layers of quantized checkpoints often are, in BF16: its tensors tell.
    Draft layers that are not in the files are dropped from the geometry (some re-releases leave
    them out and keep the config key).

    Raises CheckpointError naming the tensor that is missing, malformed or unknown, or the format
    that no known checkpoint of the family has.
    """
    forms = {form.format: form for form in family.forms}
    if declared not in forms:
        raise CheckpointError(
            f"config.json: {geometry.architecture} with {declared} experts is not supported.",
            f"Supported: {', '.join(forms)}.",
        )
    suffixes: dict[int, set[str]] = {layer: set() for layer in geometry.moe_layers}
    for name in tensors:
        found = family.parse_expert(geometry, name)
        if found is None:
            continue
        if found.layer not in suffixes or (found.expert or 0) >= geometry.num_experts:
            raise CheckpointError(
                f"tensor {name!r} is of an expert that config.json does not count "
                f"({geometry.num_experts} experts in each of layers {_span(geometry)}).",
                "config.json and the tensors do not belong together.",
            )
        suffixes[found.layer].add(found.suffix)

    absent = {layer for layer in geometry.mtp_layers if not suffixes[layer]}
    geometry = replace(
        geometry,
        moe_layers=tuple(layer for layer in geometry.moe_layers if layer not in absent),
        mtp_layers=tuple(layer for layer in geometry.mtp_layers if layer not in absent),
    )
    layers = {}
    for layer in geometry.moe_layers:
        storage = forms[declared]
        if _is_plain(family, geometry, tensors, layer, suffixes[layer]):
            storage = forms["bf16"]
        unknown = suffixes[layer] - storage.suffixes
        if unknown:
            raise CheckpointError(
                f"the experts of layer {layer} have tensors {', '.join(sorted(unknown))} besides "
                f"those of {storage.format}.",
                "Is the quantization declared in config.json or hf_quant_config.json?",
            )
        layers[layer] = LayerExperts(
            storage,
            tuple(
                {
                    projection: storage.match(family, geometry, tensors, layer, expert, projection)
                    for projection in PROJECTIONS
                }
                for expert in range(geometry.num_experts)
            ),
        )
    return geometry, layers


def _is_plain(
    family: Family,
    geometry: Geometry,
    tensors: Mapping[str, TensorRef],
    layer: int,
    suffixes: set[str],
) -> bool:
    """Whether a layer's experts are in the family's BF16 form."""
    plain = next(form for form in family.forms if form.format == "bf16")
    prefix = family.expert_prefix(geometry, layer, 0, "gate")
    first = tensors.get(family.tensor_name(prefix, plain.parts[0].suffix))
    return suffixes == plain.suffixes and first is not None and first.dtype == "BF16"


def _span(geometry: Geometry) -> str:
    return f"{geometry.moe_layers[0]} to {geometry.moe_layers[-1]}"
