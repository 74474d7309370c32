"""One rank's experts at run time: a residency manager, an operator, and what ties them to vLLM.

There is one runtime a rank, for the target model and its draft. It is found through the layers that
vLLM itself keeps by name (`static_forward_context`), so nothing here is global: the first layer
whose weights are processed makes it, the others take it from that layer.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moet.checkpoints.base import Geometry
from moet.formats.layout import Precision
from moet.kernels import ExpertRows, ExpertsOperator, SwiGLU
from moet.pack import RowSource
from moet.residency.lease import Wave
from moet.residency.manager import ResidencyManager
from moet.vllm.gate.gate import Gate
from moet.vllm.layer import Biases
from moet.vllm.phase import Fp4Tokens, decode_tokens
from moet.vllm.progress import Summary
from moet.vllm.rank import RankExperts, close_all, factors_of
from moet.vllm.stats import describe, hot_set_figures, rank_stats


@dataclass
class Runtime(RankExperts):
    """What every layer of a rank shares.

    geometry: of the model. manager: of the rank's rows. source: they come from there.
    precision: of every expert, by layer. operator: computes. decode_length: the most tokens of one
    request in a decode step. biases: of the layers that have any. recovery: by layer, the
    precision of FP4 tokens' experts; empty if there are none. gate: the confidence gate, if any.
    """

    geometry: Geometry
    manager: ResidencyManager
    source: RowSource
    precision: Mapping[int, Sequence[Precision]]
    operator: ExpertsOperator
    decode_length: int
    biases: dict[int, Biases] = field(default_factory=dict)
    recovery: Mapping[int, Precision] = field(default_factory=dict)
    gate: Gate | None = None

    def __post_init__(self) -> None:
        self._factors = {
            layer: factors_of(self.source, layer, of) for layer, of in self.precision.items()
        }
        self._recovery_factors = {
            layer: self.source.factors(layer, of) for layer, of in self.recovery.items()
        }
        self._tables: dict[int, NDArray[np.integer]] = {}
        manager = self.manager
        self._summary = Summary(lambda: describe(manager.metrics()))
        weakref.finalize(self, close_all, manager, self.source)

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
        """See the base class. x: float32 or bfloat16."""
        decode = decode_tokens(attn_metadata, x.shape[0], self.decode_length)
        x, ids = x.contiguous(), topk_ids.to(torch.int32).contiguous()
        weights = topk_weights.to(torch.float32).contiguous()
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        call = _Call(layer, x, ids, weights, decode, activation, out)
        if fp4 is None:
            self._accumulate(call)
        else:
            marks = fp4.padded(x.shape[0])
            if not fp4.again:  # also with no token left: its lease begins the step
                self._accumulate(call.only(~marks))
            self._accumulate(call.only(marks), recovery=True)
        if (biases := self.biases.get(layer)) is not None:
            biases.add_down(ids, weights, out)
        self._summary()
        return out.to(x.dtype)

    def foresee(self, tables: Mapping[int, Tensor]) -> None:
        self._tables = {layer: table.cpu().numpy() for layer, table in tables.items()}

    def prefetch(self, token_ids: Tensor) -> None:
        if self.manager.all_in_memory:
            return
        ids = np.unique(token_ids.cpu().numpy())
        known = {
            layer: table[ids[(ids >= 0) & (ids < len(table))]]
            for layer, table in self._tables.items()
        }
        self.manager.prefetch({layer: _unique(of) for layer, of in known.items()})

    def _accumulate(self, call: _Call, recovery: bool = False) -> None:
        """Adds up each expert's output for the tokens that it has."""
        layer, needed = call.layer, call.ids.cpu().numpy()
        biases = self.biases.get(layer)
        with self.manager.lease(
            layer,
            decode=_unique(needed[call.decode]),
            scan=_unique(needed[~call.decode]),
            recovery=recovery,
        ) as lease:
            for wave in lease:
                rows = ExpertRows(
                    wave.experts,
                    wave.address,
                    wave.precision,
                    self._factors_of(layer, wave, recovery),
                    self.source.layouts,
                    None if biases is None else biases.gate_up.numpy()[wave.experts],
                )
                self.operator.accumulate(
                    call.x, call.ids, call.weights, rows, call.activation, call.out
                )

    def _factors_of(self, layer: int, wave: Wave, recovery: bool) -> NDArray[np.float32]:
        """float32 [experts of the wave, 3]: their factors at the precision of their rows."""
        own = (self._recovery_factors if recovery else self._factors)[layer][wave.experts]
        if self.manager.hot_set is None:
            return own
        hot = np.array([precision == self.recovery[layer] for precision in wave.precision])
        return np.where(hot[:, None], self._recovery_factors[layer][wave.experts], own)

    def stats(self) -> dict[str, Any]:
        """The rank's statistics as plain values (`stats.rank_stats`)."""
        further = [] if self.gate is None else self.gate.figures()
        if (hot := self.manager.hot_set) is not None:
            further += hot_set_figures(hot.size, hot.exchanges)
        return rank_stats(self.manager.metrics(), further)

    def close(self) -> None:
        close_all(self.manager, self.source)


@dataclass(frozen=True)
class _Call:
    """One layer's tokens, as `Runtime.experts` was given them; out: float32 [T, hidden]."""

    layer: int
    x: Tensor
    ids: Tensor
    weights: Tensor
    decode: NDArray[np.bool_]
    activation: SwiGLU
    out: Tensor

    def only(self, tokens: NDArray[np.bool_]) -> _Call:
        """The same with no experts for tokens that are not among `tokens`, bool [T]."""
        others = torch.from_numpy(~tokens).to(self.ids.device)
        return replace(self, ids=self.ids.masked_fill(others[:, None], -1))


def _unique(ids: NDArray[np.integer]) -> NDArray[np.int64]:
    found = np.unique(ids).astype(np.int64)
    return found[found >= 0]
