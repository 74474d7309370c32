"""Whose bytes a checkpoint's tensors are, and how tensor parallelism divides them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from moet.checkpoints import Geometry, family_of
from moet.errors import CheckpointError
from moet.formats.layout import Precision, RowLayout, max_slices
from moet.plan.model_files import ModelFiles, TensorInfo


class Role(StrEnum):
    """What a tensor is for."""

    EXPERTS = "routed experts"
    DRAFT_EXPERTS = "draft layers' experts"
    DRAFT = "draft layers"
    VISION = "vision tower"
    EMBEDDING = "embedding"
    HEAD = "output head"
    DENSE = "dense layers"


class Split(StrEnum):
    """How a tensor is divided among tensor-parallel ranks."""

    SHARDED = "sharded"
    KV_HEADS = "sharded by KV heads"
    REPLICATED = "replicated"


@dataclass(frozen=True)
class Part:
    """Bytes and weights of one role.

    nbytes: by how they are divided. weights: elements of its matrices (packed ones unpacked); those
    of experts are not counted, as they follow from the geometry.
    """

    nbytes: Mapping[Split, int] = field(default_factory=dict)
    weights: int = 0

    @property
    def total(self) -> int:
        return sum(self.nbytes.values())

    def rank_bytes(self, tp: int, kv_heads: int) -> int:
        """Bytes that one of `tp` ranks holds."""
        divisor = {Split.SHARDED: tp, Split.KV_HEADS: min(tp, kv_heads), Split.REPLICATED: 1}
        return sum(-(-nbytes // divisor[split]) for split, nbytes in self.nbytes.items())


@dataclass(frozen=True)
class Inventory:
    """A model's bytes by role.

    geometry: without draft layers that the files leave out. text: the language model's config.
    fp4: the precision of its FP4 rows. source_is_fp4: whether they are the checkpoint's own.
    tensors: how many there are.
    """

    geometry: Geometry
    text: Mapping[str, Any]
    fp4: Precision
    source_is_fp4: bool
    tensors: int
    parts: Mapping[Role, Part]

    @property
    def checkpoint_bytes(self) -> int:
        return sum(part.total for part in self.parts.values())

    @property
    def kv_heads(self) -> int:
        for key in ("num_key_value_heads", "num_attention_heads"):
            heads = self.text.get(key)
            if isinstance(heads, int) and heads > 0:
                return heads
        return 1

    @property
    def target_layers(self) -> int:
        """Layers with routed experts, without draft layers."""
        return len(self.geometry.moe_layers) - len(self.geometry.mtp_layers)

    @property
    def rows(self) -> int:
        """(layer, expert) pairs of the target model."""
        return self.target_layers * self.geometry.num_experts

    @property
    def slices(self) -> int:
        """The most ranks that can share an expert."""
        return max_slices(self.geometry.intermediate)

    def layout(self, precision: Precision) -> RowLayout:
        """The rows' layout, uncut."""
        geometry = self.geometry
        return RowLayout(precision, geometry.hidden, geometry.intermediate, self.slices)

    def rank_bytes(self, role: Role, tp: int) -> int:
        return self.parts[role].rank_bytes(tp, self.kv_heads)


def take_inventory(files: ModelFiles) -> Inventory:
    """Reads every header and sums the tensors by role.

    Raises CheckpointError for a model family that is not supported, or whose files hold no routed
    experts.
    """
    family = family_of(files.config)
    geometry = family.geometry(files.config)
    source = family.declared_format(files.config, files.modelopt)
    sums: dict[Role, dict[Split, int]] = {role: {} for role in Role}
    weights = dict.fromkeys(Role, 0)
    blocks: dict[str, tuple[Role, int]] = {}
    count = 0
    for tensor in files.tensors():
        count += 1
        # Nearly all tensors are experts', and what one of a block is, all of it are.
        block, experts, _ = tensor.name.partition(".experts.")
        if experts:
            if block not in blocks:
                blocks[block] = role_of(tensor.name, geometry), _layer(tensor.name, geometry)
            role, split = blocks[block][0], Split.SHARDED
        else:
            role, split = role_of(tensor.name, geometry), split_of(tensor)
            weights[role] += _weights(tensor)
        sums[role][split] = sums[role].get(split, 0) + tensor.nbytes
    if not sums[Role.EXPERTS]:
        raise CheckpointError(
            f"{files.name}: none of its {count:,} tensors is of a routed expert.",
            "Is the download complete, and the model a Mixture of Experts?",
        )
    absent = set(geometry.mtp_layers) - {layer for _, layer in blocks.values()}
    geometry = replace(
        geometry,
        moe_layers=tuple(i for i in geometry.moe_layers if i not in absent),
        mtp_layers=tuple(i for i in geometry.mtp_layers if i not in absent),
    )
    return Inventory(
        geometry,
        text_config(files.config),
        Precision.NVFP4 if source == "nvfp4" else Precision.MXFP4,
        source in ("nvfp4", "mxfp4"),
        count,
        {role: Part(sums[role], weights[role]) for role in Role},
    )


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of config.json: multimodal models nest it."""
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) else config


_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_DRAFT = re.compile(r"(?:^|\.)mtp\.(?:layers\.)?(?:(\d+)\.)?")
_EXPERT = re.compile(r"\.experts\.")
_VISION = re.compile(r"(?:^|\.)(?:vision\w*|visual|mm_projector|multi_modal_projector)\.")
_EMBEDDING = re.compile(r"(?:^|\.)embed(?:_tokens)?\.")
_HEAD = re.compile(r"(?:^|\.)(?:lm_)?head\.")

# Linear layers that vLLM keeps whole on every rank: MLA's down-projections (deepseek_v2.py),
# routers, the sparse-attention indexer, DeepSeek-V4's compressor and hyper-connections, and the
# draft layers' joining projections.
_REPLICATED = re.compile(
    r"\.(?:q_a_proj|kv_a_proj_with_mqa|fused_qkv_a_proj|wq_a|wkv|gate|router|shared_expert_gate|"
    r"eh_proj|e_proj|h_proj)\.|indexer\.|compressor\.|hc_|mm_projector|multi_modal_projector"
)
_KV = re.compile(r"\.(?:k|v)_proj\.")


def role_of(name: str, geometry: Geometry) -> Role:
    """What the tensor `name` is for."""
    draft = _layer(name, geometry) >= geometry.num_layers
    if _EXPERT.search(name):
        return Role.DRAFT_EXPERTS if draft else Role.EXPERTS
    if draft:
        return Role.DRAFT
    for role, pattern in (
        (Role.VISION, _VISION),
        (Role.EMBEDDING, _EMBEDDING),
        (Role.HEAD, _HEAD),
    ):
        if pattern.search(name):
            return role
    return Role.DENSE


def split_of(tensor: TensorInfo) -> Split:
    """How vLLM divides the tensor among ranks."""
    if len(tensor.shape) < 2 or _REPLICATED.search(tensor.name):
        return Split.REPLICATED
    return Split.KV_HEADS if _KV.search(tensor.name) else Split.SHARDED


def _layer(name: str, geometry: Geometry) -> int:
    """The layer of a tensor; draft blocks count on from the last layer; -1 for none."""
    draft = _DRAFT.search(name)
    if draft:
        return geometry.num_layers + int(draft[1] or 0)
    match = _LAYER.search(name)
    return int(match[1]) if match and not _VISION.search(name) else -1


def _weights(tensor: TensorInfo) -> int:
    """Weights that a matrix multiplies with; 0 for vectors and scales."""
    if len(tensor.shape) < 2 or "scale" in tensor.name:
        return 0
    packed = {"U8": 2, "I8": 2, "I32": 8}.get(tensor.dtype, 1)
    return math.prod(tensor.shape) * packed
