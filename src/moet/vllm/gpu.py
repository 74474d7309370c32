"""One rank's experts on a GPU: the tiers, the kernels, and what ties them to vLLM."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from vllm.distributed import get_tp_group

from moet.checkpoints.base import Geometry
from moet.formats.layout import Precision
from moet.kernels import SwiGLU
from moet.kernels.cuda.experts import CudaExperts
from moet.pack import RowSource
from moet.residency.cuda import CudaTierDevice
from moet.residency.cuda.device import PATIENCE_SECONDS
from moet.residency.hot_set import HotSetOptions
from moet.residency.tiers import Tier, TieredResidency, TierSizes
from moet.residency.tiers.hot import TierHotSet
from moet.vllm.failures import StepMark
from moet.vllm.gate.gate import Gate
from moet.vllm.gpu_hot import HotSteps
from moet.vllm.gpu_tables import ExpertTable, all_at
from moet.vllm.layer import Biases
from moet.vllm.phase import Fp4Tokens
from moet.vllm.progress import Summary
from moet.vllm.rank import RankExperts, close_all
from moet.vllm.stats import describe_tiers, hot_set_figures, tier_stats


@dataclass
class GPURuntime(RankExperts):
    """What every layer of a rank shares; the counterpart of `runtime.Runtime`.

    geometry: of the model. tiers: of the rank's rows. device: theirs. source: rows come from there.
    precision: of every expert, by layer. operator: computes. ends: the layers
    that a pass of the target model, or of the draft, computes last. recovery: by layer, the
    precision of FP4 tokens' experts; empty if there are none. gate: the confidence gate, if any.
    hot_set: of the adaptive hot set, if there is one; recovery has one precision then.
    """

    geometry: Geometry
    tiers: TieredResidency
    device: CudaTierDevice
    source: RowSource
    precision: Mapping[int, Sequence[Precision]]
    operator: CudaExperts
    ends: frozenset[int]
    biases: dict[int, Biases] = field(default_factory=dict)
    recovery: Mapping[int, Precision] = field(default_factory=dict)
    gate: Gate | None = None
    hot_set: HotSetOptions | None = None

    def __post_init__(self) -> None:
        self._index = {layer: index for index, layer in enumerate(sorted(self.precision))}
        on = self.device.code.device
        self._own = ExpertTable.of(self.precision, self.source, on)
        # What graphs read: it is changed in place, between two steps.
        self._now = ExpertTable(self.device.code, self._own.factors.clone())
        self._fp4 = self._own
        if self.recovery:
            every = all_at(self.recovery, self.geometry.num_experts)
            self._fp4 = ExpertTable.of(every, self.source, on)
        self._all_at_fp4 = False
        self._hot = None if self.hot_set is None else self._make_hot_set(self.hot_set)
        self._failed = 0
        tiers = self.tiers
        self._summary = Summary(lambda: describe_tiers(tiers.metrics()))
        weakref.finalize(self, close_all, tiers, self.source)

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
        """See the base class. x: bfloat16.

        Launches only, so that it may be captured in a CUDA graph; not where some tokens run at FP4
        and others do not, since a replay would not see which. vLLM's warm-up passes, which have no
        requests, are given zeros: they would ask for all experts of all layers.
        """
        capturing = torch.cuda.is_current_stream_capturing()
        assert fp4 is None or fp4.all or not capturing
        if attn_metadata is None and not capturing:
            return torch.zeros_like(x)
        x = x.contiguous()
        call = _Call(
            self._index[layer],
            x,
            topk_ids.to(torch.int32).contiguous(),
            topk_weights.to(torch.float32).contiguous(),
            activation,
            torch.empty(x.shape, dtype=self.operator.out_dtype, device=x.device),
            self.biases.get(layer),
        )
        if fp4 is None:
            self._compute(call, self._now)
        elif fp4.all:
            self._compute(call, self._fp4, repeats=fp4.again)
        else:
            # Both times all tokens of the pass, some without experts: how many a pass has chooses
            # its kernel, and so the bits of its output.
            marked = fp4.padded_on(x.shape[0], x.device)
            self._compute(call.without(marked), self._now, part=0)
            self._compute(call.without(~marked), self._fp4, part=1)
        if layer in self.ends:
            self.device.finish()
        if call.biases is not None:
            call.biases.add_down(call.ids, call.weights, call.out)
        return call.out.to(x.dtype)

    def _compute(
        self, call: _Call, table: ExpertTable, *, repeats: bool = False, part: int | None = None
    ) -> None:
        """repeats, part: as of `CudaTierDevice.ensure`; later parts are added."""
        index = call.index
        rows = self.device.ensure(index, call.ids, code=table.code, repeats=repeats, part=part)
        if not torch.cuda.is_current_stream_capturing() and not self.tiers.all_in_memory:
            self.device.wait_for_rows()
        self.operator.forward(
            call.x, call.ids, call.weights, rows.address, rows.precision, table.factors[index],
            call.activation, call.out, accumulate=bool(part),
            bias=None if call.biases is None else call.biases.gate_up,
        )  # fmt: skip

    def foresee(self, tables: Mapping[int, Tensor]) -> None:
        self.device.foresee({self._index[layer]: table for layer, table in tables.items()})

    def prefetch(self, token_ids: Tensor) -> None:
        """See the base class; launches only, so that it may be captured in a CUDA graph."""
        if torch.cuda.is_current_stream_capturing() or not self.tiers.all_in_memory:
            self.device.ahead(token_ids, self._now.code)

    def all_at_fp4(self, on: bool) -> bool:
        """See the base class; for the thread that launches steps, between two of them."""
        if on != self._all_at_fp4:
            self._all_at_fp4 = on
            self._now.become(self._fp4 if on else self._own)
        return True

    def begin_step(self) -> None:
        """Before a step is launched, on its stream."""
        if self._hot is not None:
            self._hot.begin_step()

    def _make_hot_set(self, options: HotSetOptions) -> HotSteps:
        (precision,) = set(self.recovery.values())
        tiers = self.tiers
        shape = len(self._index), self.geometry.num_experts
        capacity = tiers.metrics().tiers[precision, Tier.GPU].places
        hot = TierHotSet(
            shape, options, capacity, lambda rows, failed: tiers.fetch(precision, rows, failed)
        )
        return HotSteps(hot, options.every, self.device, self._own, self._fp4, self._now)

    def mark(self) -> StepMark:
        """Behind the step that has just been launched."""
        self._summary()
        return _FailureMark(self)

    def stats(self) -> dict[str, Any]:
        """The rank's statistics as plain values (`stats.tier_stats`)."""
        further = [] if self.gate is None else self.gate.figures()
        if self._hot is not None:
            further += hot_set_figures(self._hot.hot.size, self._hot.hot.exchanges)
        return tier_stats(self.tiers.metrics(), further)

    def resize(self, precision: Precision, sizes: TierSizes) -> None:
        """See the base class; between two steps, in the worker's own thread."""
        try:
            self.tiers.resize(precision, sizes).result()
        finally:
            self.device.trim()  # also what a tier has grown by before memory was short
        if self._hot is not None and precision in self.recovery.values():
            self._hot.hot.capacity = sizes.slots

    def close(self) -> None:
        close_all(self.tiers, self.source)


@dataclass(frozen=True)
class _Call:
    """One layer's tokens. index: of the layer. x: bfloat16 [T, hidden]. ids: int32 [T, k]. weights:
    float32 [T, k]. out: [T, hidden] of the operator's dtype. biases: if the layer has any."""

    index: int
    x: Tensor
    ids: Tensor
    weights: Tensor
    activation: SwiGLU
    out: Tensor
    biases: Biases | None

    def without(self, tokens: Tensor) -> _Call:
        """The same with no experts for these tokens, bool [T]."""
        return replace(self, ids=self.ids.masked_fill(tokens[:, None], -1))


class _FailureMark(StepMark):
    """The count of failed steps as it is when all that was launched so far is over.

    Of all tensor-parallel ranks: the scheduler sees one rank's output.
    """

    def __init__(self, runtime: GPURuntime) -> None:
        self._runtime = runtime
        count = runtime.device.failed_on_device()
        if get_tp_group().world_size > 1:
            count = get_tp_group().all_reduce(count)
        self._count = torch.empty(1, dtype=torch.int64, pin_memory=True)
        self._count.copy_(count, non_blocking=True)
        self._over = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._over.record()

    def error(self) -> str | None:
        self._over.synchronize()
        runtime, count = self._runtime, int(self._count)
        if count == runtime._failed:
            return None
        runtime._failed = count
        reason = runtime.tiers.failure(runtime.device.failed_step())
        if reason is not None:
            return str(reason)
        if get_tp_group().world_size > 1:
            return "a step has failed on another rank."
        return (
            f"expert rows did not come: this process stood still for {PATIENCE_SECONDS:.0f} s "
            "while a step waited for them."
        )
