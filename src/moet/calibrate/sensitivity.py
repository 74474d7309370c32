"""How much each expert's 2-bit base costs the model: what a static map is made from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moet.calibrate.reader import Calibration
from moet.checkpoints import ExpertWeights
from moet.formats.layout import Precision
from moet.kernels import SwiGLU
from moet.kernels.reference import gated
from moet.pack import Pack, RowKey, RowSource
from moet.pack.weights import read_weights

EXPERT_TOKENS = 512  # of those that an expert saw; its error is a mean over them


@dataclass(frozen=True, eq=False)
class Sensitivity:
    """layers: the model's indices. error: float64 [layers, experts].

    An expert's error is Σ weight² · ‖base(x) − FP4(x)‖² over the tokens that go to it, divided by
    the number of all tokens and by the mean power of the residual stream where the layer adds to
    it: the relative power that the base's error has in the stream. So layers compare.
    """

    layers: tuple[int, ...]
    error: NDArray[np.float64]

    def ranked(self) -> list[tuple[int, int]]:
        """(layer, expert), the most sensitive first; equals by layer and expert."""
        order = np.argsort(-self.error.reshape(-1), kind="stable")
        experts = self.error.shape[1]
        return [(self.layers[i // experts], int(i % experts)) for i in order.tolist()]


@torch.no_grad()
def measure(
    calibration: Calibration,
    pack: Pack,
    source: RowSource,
    activation: SwiGLU,
    progress: Callable[[int, int], None],
) -> Sensitivity:
    """The sensitivity of every expert of the calibration's layers.

    source: the rows of `pack`, whole, at both precisions. progress: layers done, layers in all.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    layers = calibration.metadata.layers
    errors = []
    for number, layer in enumerate(layers):
        samples = calibration.layer(layer)
        assert samples is not None, "the calibration has its own layers"
        high = pack.layers[layer].layout.fp4.precision
        power = stream_power(calibration, layer)
        row = []
        for expert in range(calibration.metadata.experts):
            token, weight = samples.of(expert)
            step = max(1, -(-len(token) // EXPERT_TOKENS))
            x, g = samples.x[token[::step]].to(device).float(), weight[::step].to(device)
            base, fp4 = (
                _output(read_weights(source, RowKey(layer, expert, p)), x, activation)
                for p in (Precision.BASE, high)
            )
            error = (base - fp4) * g[:, None]
            mean = float(error.double().square().sum()) / max(1, len(x))
            row.append(mean * len(token) / samples.tokens / power)
        errors.append(row)
        progress(number + 1, len(layers))
    return Sensitivity(layers, np.array(errors))


def stream_power(calibration: Calibration, layer: int) -> float:
    """Mean |h|² of the residual stream at a layer's entry.

    Where the collection could not see the stream: of the layer's own inputs, which norms make
    alike in all layers.
    """
    powers = calibration.array(layer, "stream_power")
    seen = powers[np.isfinite(powers)]
    if len(seen) and seen.mean() > 0:
        return float(seen.mean())
    moment = calibration.array(layer, "second_moment")
    return float(np.trace(moment.astype(np.float64))) or 1.0


def choose(sensitivity: Sensitivity, count: int) -> dict[int, Sequence[int]]:
    """The `count` most sensitive experts: layer → experts, ascending."""
    chosen: dict[int, list[int]] = {}
    for layer, expert in sensitivity.ranked()[:count]:
        chosen.setdefault(layer, []).append(expert)
    return {layer: sorted(chosen[layer]) for layer in sorted(chosen)}


def _output(weights: ExpertWeights, x: Tensor, activation: SwiGLU) -> Tensor:
    gate, up, down = (matrix.to(x.device) for matrix in weights)
    return gated(x @ gate.T, x @ up.T, activation) @ down.T
