"""The operator that kernels implement: the routed experts of one layer, on given rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from moet.formats.layout import Precision, RowLayout
from moet.registry import Registry


@dataclass(frozen=True)
class SwiGLU:
    """h = silu(gate) · up; with a limit, gate ≤ limit and |up| ≤ limit first (DeepSeek-V4)."""

    limit: float | None = None


@dataclass(frozen=True)
class ExpertRows:
    """Where a layer's rows are.

    experts: int64 [n], the experts that can be read now, ascending.
    address: int64 [n], where the rank's run of slices of each begins.
    precision: the precision of each row, [n].
    factor: float32 [n, 3], the factors of gate, up and down.
    layouts: the rank's layout (`RowLayout.local`) for every precision present.
    """

    experts: NDArray[np.int64]
    address: NDArray[np.int64]
    precision: list[Precision]
    factor: NDArray[np.float32]
    layouts: Mapping[Precision, RowLayout]


class ExpertsOperator(ABC):
    """Routed experts of one layer.

    Results are batch-invariant: a token's output bits depend on its own input, routing and rows
    only, never on the other tokens, on the waves, or on where rows lie.
    """

    name: str

    @abstractmethod
    def accumulate(
        self,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        rows: ExpertRows,
        activation: SwiGLU,
        out: Tensor,
    ) -> None:
        """Adds the contributions of the experts in `rows` to `out`, in ascending order of expert.

        x: [T, hidden] float32 or bfloat16. topk_ids: int32 [T, k]; −1 and experts that are not in
        `rows` are skipped. topk_weights: float32 [T, k]. out: float32 [T, hidden].
        Calling it once with all experts or once for each of several ascending waves gives the same
        bits: out[t] = Σ over experts e ascending of weight[t, e] · FFN_e(x[t]).
        """


OPERATORS: Registry[type[ExpertsOperator]] = Registry("experts operator")
