"""One rank's routed experts at run time: what vLLM's layers and workers ask of them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from moet.checkpoints.base import Geometry
from moet.closing import Closing
from moet.errors import ConfigError, PackError
from moet.formats.layout import Precision
from moet.kernels import ExpertsOperator, SwiGLU
from moet.pack import RowSource
from moet.residency.tiers.options import TierSizes
from moet.vllm.layer import Biases
from moet.vllm.phase import Fp4Tokens

if TYPE_CHECKING:
    from moet.kernels.cuda.experts import CudaExperts
    from moet.vllm.gate.gate import Gate


class RankExperts(Closing):
    """There is one a rank, for the target model and its draft. It is found through the layers that
    vLLM itself keeps by name (`static_forward_context`), so nothing is global.

    Attributes:
        geometry: of the model. precision: of every expert, by layer. operator: computes.
        biases: of the layers that have any. recovery: by layer, the precision of FP4 tokens'
        experts; empty if there are none. gate: the confidence gate, if any. source: rows come from
        there.
    """

    geometry: Geometry
    precision: Mapping[int, Sequence[Precision]]
    operator: ExpertsOperator | CudaExperts
    biases: dict[int, Biases]
    recovery: Mapping[int, Precision]
    gate: Gate | None
    source: RowSource

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

    @abstractmethod
    def experts(
        self,
        layer: int,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        attn_metadata: Any,
        activation: SwiGLU,
        fp4: Fp4Tokens | None = None,
    ) -> Tensor:
        """The rank's part of a layer's routed experts: [T, hidden] in x's dtype.

        x: [T, hidden]. topk_ids: int [T, k], −1 = none. topk_weights: float32 [T, k].
        attn_metadata: the forward context's; None in vLLM's warm-up passes. fp4: the tokens whose
        experts all run at recovery's precision.
        """

    def seen_through(self) -> RankExperts:
        """The runtime that computes: this one, unless it only looks on."""
        return self

    def foresee(self, tables: Mapping[int, Tensor]) -> None:
        """Before the first pass: these layers' experts follow from the token ids.

        tables: by layer, int [vocabulary, top-k] (`ahead.hash_tables`).
        """

    def prefetch(self, token_ids: Tensor) -> None:
        """A pass of these tokens, int [T], begins: has rows read that its hash-routed layers will
        find on disk, waiting for nothing. They are right without it."""

    @abstractmethod
    def stats(self) -> dict[str, Any]:
        """The rank's statistics as plain values (`stats.py`)."""

    def all_at_fp4(self, on: bool) -> bool:
        """From the next pass on all experts run at recovery's precision, or each at its own.

        False: not here; tokens are marked instead (`phase.mark_fp4_tokens`).
        """
        return False

    def resize(self, precision: Precision, sizes: TierSizes) -> None:
        """Makes room for more or fewer rows while requests are served; returns when it is done.

        Raises ConfigError for sizes that cannot work; nothing has changed then.
        """
        raise ConfigError("these pools cannot be resized while the server runs.")


def factors_of(
    source: RowSource, layer: int, precision: Sequence[Precision]
) -> NDArray[np.float32]:
    """float32 [experts, 3]: the factors of each expert at its precision."""
    tables = {p: source.factors(layer, p) for p in set(precision)}
    return np.stack([tables[p][expert] for expert, p in enumerate(precision)])


def close_all(*parts: Closing) -> None:
    """One after the other: what reads, then what it reads from."""
    for part in parts:
        part.close()
