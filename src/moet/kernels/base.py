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
    """h = gate · sigmoid(alpha · gate) · (up + beta).

    With a limit, gate ≤ limit and |up| ≤ limit first (DeepSeek-V4, gpt-oss). alpha and beta are
    gpt-oss's (1.702 and 1); without them it is silu(gate) · up.
    """

    limit: float | None = None
    alpha: float = 1.0
    beta: float = 0.0


GPT_OSS = SwiGLU(limit=7.0, alpha=1.702, beta=1.0)


@dataclass(frozen=True)
class ExpertRows:
    """Where a layer's rows are.

    experts: int64 [n], the experts that can be read now, ascending.
    address: int64 [n], where the rank's run of slices of each begins.
    precision: the precision of each row, [n].
    factor: float32 [n, 3], the factors of gate, up and down.
    layouts: the rank's layout (`RowLayout.local`) for every precision present.
    bias: float32 [n, 2, intermediate], the rank's biases of gate and up; None where there are none.
        Those of down are added by the caller.
    """

    experts: NDArray[np.int64]
    address: NDArray[np.int64]
    precision: list[Precision]
    factor: NDArray[np.float32]
    layouts: Mapping[Precision, RowLayout]
    bias: NDArray[np.float32] | None = None


class ExpertsOperator(ABC):
    """Routed experts of one layer.

    Results are batch-invariant: a token's output bits depend on its own input, routing and rows
    only, never on the other tokens, on the waves, or on where rows lie.

    Attributes:
        name: the registry's. any_swiglu: whether it computes SwiGLU with alpha and beta, and
            biases; an operator that does not must not be given any.
    """

    name: str
    any_swiglu: bool = False

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
