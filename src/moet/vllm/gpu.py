"""One rank's experts on a GPU: the tiers, the kernels, and what ties them to vLLM."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.distributed import get_tp_group

from moet.checkpoints.base import Geometry
from moet.formats.layout import Precision
from moet.kernels import SwiGLU
from moet.kernels.cuda.experts import CudaExperts
from moet.pack import RowSource
from moet.residency.cuda import CudaTierDevice
from moet.residency.tiers import TieredResidency, TierSizes
from moet.vllm.failures import StepMark
from moet.vllm.layer import Biases
from moet.vllm.phase import Fp4Tokens
from moet.vllm.progress import Summary
from moet.vllm.rank import RankExperts, close_all, factors_of
from moet.vllm.stats import describe_tiers, tier_stats


@dataclass
class GPURuntime(RankExperts):
    """What every layer of a rank shares; the counterpart of `runtime.Runtime`.

    geometry: of the model. tiers: of the rank's rows. device: theirs. source: rows come from there.
    precision: of every expert, by layer. operator: computes. ends: the layers
    that a pass of the target model, or of the draft, computes last.
    """

    geometry: Geometry
    tiers: TieredResidency
    device: CudaTierDevice
    source: RowSource
    precision: Mapping[int, Sequence[Precision]]
    operator: CudaExperts
    ends: frozenset[int]
    biases: dict[int, Biases] = field(default_factory=dict)
    gate: None = None

    def __post_init__(self) -> None:
        layers = sorted(self.precision)
        self._index = {layer: index for index, layer in enumerate(layers)}
        factors = [factors_of(self.source, layer, self.precision[layer]) for layer in layers]
        self._factors = torch.from_numpy(np.stack(factors)).cuda()
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

        Launches only, so that it may be captured in a CUDA graph. vLLM's warm-up passes, which have
        no requests, are given zeros: they would ask for all experts of all layers.
        """
        assert fp4 is None, "refused at start"
        if attn_metadata is None and not torch.cuda.is_current_stream_capturing():
            return torch.zeros_like(x)
        index = self._index[layer]
        ids = topk_ids.to(torch.int32).contiguous()
        weights = topk_weights.to(torch.float32).contiguous()
        out = torch.empty(x.shape, dtype=self.operator.out_dtype, device=x.device)
        biases = self.biases.get(layer)
        rows = self.device.ensure(index, ids)
        self.operator.forward(
            x.contiguous(), ids, weights, rows.address, rows.precision, self._factors[index],
            activation, out, bias=None if biases is None else biases.gate_up,
        )  # fmt: skip
        if layer in self.ends:
            self.device.finish()
        if biases is not None:
            biases.add_down(ids, weights, out)
        return out.to(x.dtype)

    def mark(self) -> StepMark:
        """Behind the step that has just been launched."""
        self._summary()
        return _FailureMark(self)

    def stats(self) -> dict[str, Any]:
        """The rank's statistics as plain values (`stats.tier_stats`)."""
        return tier_stats(self.tiers.metrics())

    def resize(self, precision: Precision, sizes: TierSizes) -> None:
        """See the base class; between two steps, in the worker's own thread."""
        self.tiers.resize(precision, sizes).result()
        self.device.trim()

    def close(self) -> None:
        close_all(self.tiers, self.source)


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
        return "a step has failed on another rank." if reason is None else str(reason)
