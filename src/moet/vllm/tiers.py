"""How large a GPU's tiers are: the size settings, applied to what vLLM leaves.

vLLM's KV cache gets what remains of `gpu_memory_utilization` when everything else is there: vLLM
measures what is in use after a trial step, whoever has allocated it. So what is taken here, while
the weights are processed, it counts like weights, and `auto` must leave room for the KV cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moet.checkpoints.base import Geometry
from moet.errors import ConfigError
from moet.formats.layout import Precision, RowLayout
from moet.plan.reserve import prefill_buffers
from moet.residency.sizing import share_rows, size_bytes, size_pool
from moet.residency.tiers.options import TierOptions, TierSizes, check_sizes, least_places
from moet.settings import Settings
from moet.units import byte_size
from moet.vllm.pools import host_budget, kv_bytes, pool_setting, reserve_for

Owned = Mapping[Precision, NDArray[np.bool_]]


@dataclass(frozen=True)
class TierPlan:
    """sizes: of the tiers. staging: bytes of GPU memory for the buffers that prefill streams layers
    through; 0: it reads rows where they are. lines: where memory goes and why, for the log."""

    sizes: Mapping[Precision, TierSizes]
    staging: int
    lines: Sequence[str]


@dataclass(frozen=True)
class _Line:
    """nbytes of what, and why."""

    what: str
    nbytes: int
    why: str

    def __str__(self) -> str:
        return f"{self.what:<17}{byte_size(self.nbytes):>10}  {self.why}"


@dataclass(frozen=True)
class Rows:
    """What is to be placed. owned: bool [layers, experts]; row_bytes, count: of each precision."""

    owned: Owned
    row_bytes: Mapping[Precision, int]

    @property
    def count(self) -> dict[Precision, int]:
        return {p: int(mask.sum()) for p, mask in self.owned.items()}

    @property
    def layer_bytes(self) -> int:
        """The most bytes of a layer."""
        layers = sum(mask.sum(axis=1) * self.row_bytes[p] for p, mask in self.owned.items())
        return int(np.max(layers, initial=0))

    def nbytes(self, counts: Mapping[Precision, int]) -> int:
        return sum(count * self.row_bytes[p] for p, count in counts.items())

    def share(self, wanted: Mapping[Precision, int], nbytes: int) -> dict[Precision, int]:
        """The rows of those wanted that fit into `nbytes`.

        An expert that has rows of two precisions uses its base row more often: base comes first.
        """
        precisions = sum(mask.astype(np.int64) for mask in self.owned.values())
        return share_rows(
            wanted, self.row_bytes, nbytes, in_turn=bool(np.max(precisions, initial=0) > 1)
        )


def owned_rows(
    precision: Mapping[int, Sequence[Precision]], recovery: Mapping[int, Precision] | None = None
) -> dict[Precision, NDArray[np.bool_]]:
    """Which rows there are: bool [layers, experts] of each precision, layers ascending.

    Args:
        precision: of every expert, by layer. recovery: by layer, a precision that all its experts
            have rows of besides.
    """
    names = np.array([precision[layer] for layer in sorted(precision)], dtype=np.str_)
    masks = {p: names == p for p in Precision}
    for index, layer in enumerate(sorted(precision)):
        if recovery:
            masks[recovery[layer]][index] = True
    return {p: mask for p, mask in masks.items() if mask.any()}


def most_layer_rows(vllm_config: Any, geometry: Geometry) -> int:
    """The most rows of a layer that a step can use."""
    tokens: int = vllm_config.scheduler_config.max_num_batched_tokens
    return min(geometry.num_experts, tokens * geometry.top_k)


def size_tiers(
    settings: Settings,
    owned: Owned,
    layouts: Mapping[Precision, RowLayout],
    vllm_config: Any,
    *,
    gpu_free: int,
    gpu_total: int,
    layer_rows: int | None = None,
) -> TierPlan:
    """Sizes the tiers of this rank, once everything but experts is in GPU memory.

    Tiers set to "auto" share what is free in proportion to their rows' bytes.

    Args:
        owned: which rows there are, by precision, bool [layers, experts]. An expert may have rows
            of two precisions.
        gpu_free, gpu_total: bytes, as `torch.cuda.mem_get_info` has them.
        layer_rows: the most rows of a layer that a step can use; None: all of them.

    Raises ConfigError naming the setting for what cannot be, or is too small to work.
    """
    owned = {p: owned[p] for p in Precision if p in owned and owned[p].any()}
    rows = Rows(owned, {p: layouts[p].row_bytes for p in owned})
    left, lines = _gpu_budget(vllm_config, gpu_free, gpu_total)
    slots, staging = _gpu(settings, rows, left, gpu_free)
    if staging:
        lines.append(_Line("  prefill buffers", staging, "layers pass through them"))
    for p, count in rows.count.items():
        why = f"{slots[p]:,} of {count:,} rows ({' '.join(pool_setting(settings, p))})"
        lines.append(_Line(f"  {p} rows", slots[p] * rows.row_bytes[p], why))
    memory, budget = host_budget(vllm_config, gpu=True)
    options = settings.tier_options(layer_rows)
    places = arena_places(settings.arena, rows, slots, options, memory.available, budget)
    lines += [
        _Line("host memory", memory.total, f"of which {byte_size(memory.available)} are free:"),
        _Line("  others", memory.available - budget, "system, vLLM's processes, loading, ranks"),
    ]
    for p, count in rows.count.items():
        outside = count - slots[p]
        why = (
            f"room for {places[p]:,} rows, {outside:,} are not on the GPU (arena {settings.arena})"
        )
        lines.append(_Line(f"  {p} rows", places[p] * rows.row_bytes[p], why))
        if disk := max(0, outside - places[p]):
            lines.append(_Line(f"  {p} rows", disk * rows.row_bytes[p], f"{disk:,} on disk only"))
    sizes = {p: TierSizes(slots[p], places[p]) for p in owned}
    return TierPlan(sizes, staging, [str(line) for line in lines])


def _gpu_budget(vllm_config: Any, free: int, total: int) -> tuple[int, list[_Line]]:
    """Bytes of GPU memory for experts, and what the rest is for."""
    utilization = vllm_config.cache_config.gpu_memory_utilization
    reserve = reserve_for(vllm_config, gpu=True)
    # The context is there already.
    workspace = {name: n for name, n in reserve.workspace.items() if name != "CUDA context"}
    if vllm_config.model_config.enforce_eager:
        del workspace["CUDA graphs"]
    outside = total - int(total * utilization)
    left = free - outside - sum(workspace.values())
    kv, why = kv_bytes(vllm_config, reserve, left)
    return left - kv, [
        _Line("GPU memory", total, f"of which {byte_size(free)} are free:"),
        _Line("  not vLLM's", outside, f"gpu_memory_utilization {utilization:g}"),
        _Line("  KV cache", kv, f"{why}; vLLM takes what stays free besides"),
        *(_Line(f"  {name}", nbytes, "assumed") for name, nbytes in workspace.items()),
    ]


def _gpu(settings: Settings, rows: Rows, left: int, free: int) -> tuple[dict[Precision, int], int]:
    """Slots of each precision, and bytes of prefill's buffers. left: bytes for experts."""
    count, fixed = rows.count, {}
    for p in rows.owned:
        name, setting = pool_setting(settings, p)
        if setting != "auto":
            fixed[p] = size_pool(
                setting, name=name, rows=count[p], row_bytes=rows.row_bytes[p]
            ).slots
    automatic = {p: count[p] for p in count if p not in fixed}
    left -= rows.nbytes(fixed)
    staging = 0
    if settings.prefill_staging is True:
        staging = 2 * rows.layer_bytes
    elif settings.prefill_staging == "auto":
        resident = all(fixed[p] == count[p] for p in fixed) and rows.nbytes(automatic) <= left
        staging = 0 if resident else prefill_buffers(rows.layer_bytes, left)
    found = fixed | rows.share(automatic, left - staging)
    taken = rows.nbytes(found) + staging
    if taken > free:
        raise ConfigError(
            f"{byte_size(taken)} of GPU memory for experts are more than the {byte_size(free)} "
            "that are free.",
            'Make base_pool or fp4_pool smaller, or set it to "auto".',
        )
    return {p: found[p] for p in count}, staging


def arena_places(
    setting: str,
    rows: Rows,
    slots: Mapping[Precision, int],
    options: TierOptions,
    available: int,
    budget: int,
) -> dict[Precision, int]:
    """Places of each precision in pinned host memory.

    Args:
        setting: "auto", a share, bytes of all precisions together, or a number of each.
        slots: in GPU memory. available: bytes that are free. budget: of these, what "auto" may
            take.

    Raises ConfigError for more than is available, or too little to work.
    """
    count = rows.count
    least = {p: least_places(mask, slots[p], options) for p, mask in rows.owned.items()}
    # Rows that are not in GPU memory, and room for those that pass through or change places.
    most = {p: max(least[p], count[p] - slots[p] + options.max_moves + 1) for p in count}
    nbytes = budget if setting == "auto" else size_bytes(setting)
    if nbytes is None:
        asked = {p: _some(setting, count[p], most[p], rows.row_bytes[p]) for p in count}
    elif (spare := nbytes - rows.nbytes(least)) >= 0:
        more = rows.share({p: most[p] - least[p] for p in count}, spare)
        asked = {p: least[p] + more[p] for p in count}
    else:
        asked = rows.share(most, nbytes)  # too few
    if (taken := rows.nbytes(asked)) > available:
        raise ConfigError(
            f"arena {setting}: {byte_size(taken)} of host memory are more than the "
            f"{byte_size(available)} that are free.",
            'Make it smaller, or set it to "auto".',
        )
    for p, mask in rows.owned.items():
        try:
            check_sizes(p, mask, TierSizes(slots[p], asked[p]), rows.row_bytes[p], options)
        except ConfigError as error:
            raise ConfigError(f"arena {setting}: {error.message}", error.hint) from None
    return asked


def _some(setting: str, count: int, most: int, row_bytes: int) -> int:
    """Places for a share or a number of `count` rows; for all of them, the most that are of use."""
    places = size_pool(setting, name="arena", rows=count, row_bytes=row_bytes).slots
    return most if places >= count else min(most, places)
