"""Levels 1 to 3: the base that preserves what an expert puts out on the calibration's tokens."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moet.errors import CheckpointError
from moet.quantize.base import (
    QUANTIZERS,
    BaseQuantizer,
    Expert,
    MatrixContext,
    TwoBitExpert,
)
from moet.quantize.data_free import DataFreeQuantizer
from moet.quantize.feedback import error_feedback, inverse_factor
from moet.quantize.moments import (
    PSEUDO_TOKENS,
    Moments,
    layer_moments,
    prior_tokens,
    rows_of,
    sums,
)
from moet.quantize.refine import descend, fit_scales
from moet.quantize.rounding import Draft, draft_of, factor_of
from moet.quantize.samples import LayerSamples, SampleSource

_LAYERS_KEPT = 2
_SWEEPS = 3

Activation = Callable[[Tensor, Tensor], Tensor]
"""gate, up [tokens, intermediate] → the down projection's input."""


class CalibratedQuantizer(BaseQuantizer):
    """What levels 1 to 3 share: an expert's moments, and the way back to level 0.

    Args:
        samples: what the layers saw.
        activation: of gate's and up's outputs, what the down projection multiplies; default:
            silu(gate) · up.
        device: where to compute; default: the GPU where there is one, else the CPU.

    Of an expert that saw tokens the moments are mostly its own, of one that saw few or none the
    layer's (`moments`). A layer without samples, and moments that are not finite or all zero, leave
    level 0. `bases` counts which of the three each matrix was made from.
    """

    def __init__(
        self,
        samples: SampleSource,
        *,
        activation: Activation | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.calibration = samples.digest
        self.bases: Counter[str] = Counter()
        self._samples, self._activation = samples, activation or _swiglu
        self._device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._data_free = DataFreeQuantizer()
        self._lock = threading.Lock()
        self._layers: dict[int, tuple[LayerSamples | None, Moments | None]] = {}

    @torch.no_grad()
    def quantize_expert(self, weights: Expert, layer: int, expert: int) -> TwoBitExpert:
        for projection, weight in zip(Expert._fields, weights, strict=True):
            if not torch.isfinite(torch.from_numpy(weight)).all():
                context = MatrixContext(layer, expert, projection)
                raise CheckpointError(f"{context} has a weight that is not finite.")
        gate, up, down = weights
        samples, prior = self._of_layer(layer)
        if samples is None or prior is None:
            with self._lock:
                self.bases["level 0"] += 3
            return self._data_free.quantize_expert(weights, layer, expert)

        token, g = samples.of(expert)
        square = g.square().to(self._device)
        base = "expert" if len(token) else "layer"
        extra = prior_tokens(samples)
        extra_square = samples.token_weight[extra].to(self._device)
        pseudo = PSEUDO_TOKENS * samples.mean_square

        x, q = self._rows(samples, token)
        both = [torch.from_numpy(gate).to(self._device), torch.from_numpy(up).to(self._device)]
        gate_up = self._base(both, sums(x, q, square).plus(prior, pseudo), base)
        exact = torch.cat(both)
        ours = exact if q is None else gate_up.values()

        def inner(rows: Tensor, by: Tensor) -> Tensor:
            return self._activation(*(rows @ by.T).chunk(2, 1))

        y, y_quantized = self._rows(samples, extra)
        down_prior = sums(
            inner(y, exact), None if y_quantized is None else inner(y_quantized, ours), extra_square
        ).moments()
        own = sums(inner(x, exact), None if q is None else inner(q, ours), square)
        last = self._base(
            [torch.from_numpy(down).to(self._device)], own.plus(down_prior, pseudo), base
        )
        n = len(gate)
        return TwoBitExpert(gate_up.rows(0, n), gate_up.rows(n, 2 * n), last.rows(0, len(down)))

    def _of_layer(self, layer: int) -> tuple[LayerSamples | None, Moments | None]:
        """The samples and the layer's moments, kept for the layers at hand only."""
        with self._lock:
            if layer not in self._layers:
                # The experts of a file's last layer and of the next file's first may alternate.
                for old in list(self._layers)[: 1 - _LAYERS_KEPT]:
                    del self._layers[old]
                samples = self._samples.layer(layer)
                moments = None if samples is None else layer_moments(samples, self._device)
                self._layers[layer] = samples, moments
            return self._layers[layer]

    def _rows(self, samples: LayerSamples, token: Tensor) -> tuple[Tensor, Tensor | None]:
        q = samples.quantized
        return (
            rows_of(samples.x[token], self._device),
            None if q is None else rows_of(q[token], self._device),
        )

    def _base(self, matrices: Sequence[Tensor], moments: Moments, base: str) -> Draft:
        """The base of matrices with one input, one below the other."""
        regular = moments.regular()
        draft = None if regular is None else self._choose(matrices, regular)
        with self._lock:
            self.bases[base if draft is not None else "level 0"] += len(matrices)
        return self._level_0(matrices) if draft is None else draft

    def _level_0(self, matrices: Sequence[Tensor]) -> Draft:
        context = MatrixContext(-1, -1, "")
        done = [self._data_free.quantize(matrix.cpu().numpy(), context) for matrix in matrices]
        return draft_of(done, self._device)

    @abstractmethod
    def _choose(self, matrices: Sequence[Tensor], moments: Moments) -> Draft | None:
        """The base by this level, or None where the moments do not allow it."""


@QUANTIZERS.register("scales")
class ScalesQuantizer(CalibratedQuantizer):
    """Level 1: level 0's codes; all scales of a row by joint least squares on the outputs."""

    name = "scales"
    level = 1

    def _choose(self, matrices: Sequence[Tensor], moments: Moments) -> Draft | None:
        weight = torch.cat(list(matrices))
        start = self._level_0(matrices)
        return _better(start, fit_scales(start, weight, moments.hessian), weight, moments.hessian)


@QUANTIZERS.register("gptq")
class GptqQuantizer(CalibratedQuantizer):
    """Level 2: codes by error feedback; then, in turn, scales by least squares and single codes."""

    name = "gptq"
    level = 2

    def _choose(self, matrices: Sequence[Tensor], moments: Moments) -> Draft | None:
        weight = torch.cat(list(matrices))
        factor = torch.cat([factor_of(matrix) for matrix in matrices])
        hessian = moments.hessian
        inverse = inverse_factor(hessian)
        if inverse is None:
            return None
        weight = moments.corrected(weight)
        draft = error_feedback(weight, inverse, factor)
        draft = _better(draft, fit_scales(draft, weight, hessian), weight, hessian)
        for _ in range(_SWEEPS):
            draft = descend(draft, weight, hessian)
            draft = _better(draft, fit_scales(draft, weight, hessian), weight, hessian)
        return draft


@QUANTIZERS.register("sequential")
class SequentialQuantizer(GptqQuantizer):
    """Level 3: level 2 against what FP4 puts out, on the inputs of the model quantized so far."""

    name = "sequential"
    level = 3
    in_order = True


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return torch.nn.functional.silu(gate) * up


def _better(old: Draft, new: Draft, target: Tensor, hessian: Tensor) -> Draft:
    """Row by row the one with the smaller output error: rounding scales can cost more than the
    least squares gained."""
    take = (_cost(new, target, hessian) < _cost(old, target, hessian))[:, None]
    return Draft(
        torch.where(take, new.levels, old.levels),
        torch.where(take, new.scale, old.scale),
        old.factor,
    )


def _cost(draft: Draft, target: Tensor, hessian: Tensor) -> Tensor:
    error = draft.values() - target
    return ((error @ hessian) * error).sum(1)
