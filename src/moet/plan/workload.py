"""What a model is to do: how long the requests, how many at once, in which precision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from moet.errors import ConfigError
from moet.plan.kv import KV_DTYPES
from moet.residency.sizing import size_pool

# vLLM's default of --gpu-memory-utilization.
UTILIZATION = 0.92
DEFAULT_CONTEXT = 32_768
# The length at which decoding is predicted: later tokens read more KV cache.
DEPTH = 4096


@dataclass(frozen=True)
class Workload:
    """context: tokens a request may have. streams: requests at once. kv_dtype: vLLM's
    --kv-cache-dtype. drafts: tokens drafted a step, 0 for no speculation. chunk: prompt tokens a
    step (vLLM's --max-num-batched-tokens). utilization: share of a GPU's memory that vLLM may use.
    base_pool: moet's setting of that name; a pool is never larger than what fits. routing: what is
    known of it, as of `routing_points`; "": nothing.
    """

    context: int = DEFAULT_CONTEXT
    streams: int = 1
    kv_dtype: str = "auto"
    drafts: int = 0
    chunk: int = 8192
    utilization: float = UTILIZATION
    base_pool: str = "auto"
    routing: str = ""

    def __post_init__(self) -> None:
        for name, value, least in (
            ("context", self.context, 1), ("streams", self.streams, 1),
            ("drafts", self.drafts, 0), ("chunk", self.chunk, 1),
        ):  # fmt: skip
            if value < least:
                raise ConfigError(f"{name} is {value}.", f"It must be at least {least}.")
        self.pool_limit(1, 1)
        routing_points(self.routing)
        if self.kv_dtype not in KV_DTYPES:
            raise ConfigError(
                f"kv_dtype {self.kv_dtype!r} is not one that the planner can count.",
                f"Choose one of: {', '.join(KV_DTYPES)}.",
            )

    def pool_limit(self, rows: int, row_bytes: int) -> int:
        """Rows that `base_pool` allows of `rows`. Raises ConfigError for what is no size."""
        if self.base_pool == "auto":
            return rows
        return size_pool(self.base_pool, name="base_pool", rows=rows, row_bytes=row_bytes).slots

    @property
    def tokens(self) -> int:
        """Tokens that one decode step computes."""
        return self.streams * (1 + self.drafts)


def routing_points(text: str) -> list[tuple[float, float]]:
    """Points of the curve of `plan.routing`: 19:96,50:99 → [(0.19, 0.96), (0.5, 0.99)], where the
    19 % most wanted experts of a layer get 96 % of its routings. Raises ConfigError."""
    try:
        points = [_point(part) for part in text.split(",") if part]
        known = _is_curve([(0.0, 0.0), *points, (1.0, 1.0)])
    except ValueError:
        known = False
    if not known:
        raise ConfigError(
            f"routing {text!r} is no list of shares of the most wanted experts and of the routings "
            "that they get.",
            'Give percent, ascending: "19:96" or "19:96,50:99".',
        )
    return points


def _point(text: str) -> tuple[float, float]:
    experts, routings = (float(value) / 100 for value in text.split(":"))
    return experts, routings


def _is_curve(points: Sequence[tuple[float, float]]) -> bool:
    """Whether it only rises, ever less steeply: each expert is wanted no more than those before."""
    steps = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(points)]
    if not all(width > 0 and rise >= 0 for width, rise in steps):
        return False
    slopes = [rise / width for width, rise in steps]
    return slopes == sorted(slopes, reverse=True)
