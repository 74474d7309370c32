"""Second moments of an expert's inputs, made fit for a Cholesky factorization.

An expert that saw few tokens says little about its inputs, so it shares what the whole layer saw:
`PSEUDO_TOKENS` tokens' worth of the layer's moment are added to its own. An expert without any
token has the layer's moment alone. For the down projection, whose inputs are the expert's own
intermediate activations, the layer's moment is that of evenly spaced tokens of the layer, sent
through the expert's gate and up.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moet.quantize.samples import LayerSamples

PSEUDO_TOKENS = 256
PRIOR_TOKENS = 1024  # that are sent through every expert
# Chosen by the error of experts of tiny-moe on tokens that were not used (49,152 others were).
# Without SHRINK that error is 4 % higher, without CORRECTION level 3 is worse than level 2.
SHRINK, DAMPING, CORRECTION = 0.3, 0.01, 2.0
_CHUNK = 2**25  # elements of activations in float32 at once


@dataclass(frozen=True, eq=False)
class Moments:
    """hessian: E[q qᵀ], float32 [K, K], q the input with which the base will be used.

    cross: E[x qᵀ], x the same tokens' input at FP4; None where q is x.
    """

    hessian: Tensor
    cross: Tensor | None = None

    def regular(self) -> Moments | None:
        """With the correlations made smaller by `SHRINK`, and a little added to the diagonal.

        What is estimated from a calibration's tokens fits others worse; a smaller correlation is
        nearer to what they have. Relative to each input's own power, because a few inputs of a
        language model have most of it. None where the moments are not finite, or all zero: they
        say nothing.
        """
        diagonal = self.hessian.diagonal()
        mean = float(diagonal.double().mean())
        finite = bool(torch.isfinite(self.hessian).all()) and (
            self.cross is None or bool(torch.isfinite(self.cross).all())
        )
        if not finite or not mean > 0:
            return None
        hessian = (1 - SHRINK) * self.hessian
        hessian.diagonal().add_(SHRINK * diagonal + DAMPING * mean)
        # x = q + (x − q): only the first part is regularized here.
        cross = None if self.cross is None else self.cross - self.hessian + hessian
        return Moments(hessian, cross)

    def corrected(self, weight: Tensor) -> Tensor:
        """W' [N, K] for which W' q is nearest to W x: W + W E[(x − q) qᵀ] (H + damping)⁻¹.

        The damping is `CORRECTION` times the diagonal: what the earlier layers' error has in common
        with the input is a far weaker signal than H.
        """
        if self.cross is None:
            return weight
        damped = self.hessian.clone()
        damped.diagonal().mul_(1 + CORRECTION)
        change = weight @ (self.cross - self.hessian)
        lower = torch.linalg.cholesky(damped)
        return weight + torch.cholesky_solve(change.T.contiguous(), lower).T


@dataclass(frozen=True, eq=False)
class Sums:
    """Σ g² q qᵀ and Σ g² x qᵀ over tokens, and Σ g²."""

    square: Tensor
    cross: Tensor | None
    weight: float

    def moments(self) -> Moments:
        """The means; zeros where there is no weight."""
        scale = 1 / self.weight if self.weight else 0.0
        return Moments(self.square * scale, None if self.cross is None else self.cross * scale)

    def plus(self, prior: Moments, weight: float) -> Moments:
        """The means when `prior` counts with `weight`."""
        total = self.weight + weight
        scale = 1 / total if total else 0.0
        cross = None
        if self.cross is not None and prior.cross is not None:
            cross = (self.cross + weight * prior.cross) * scale
        return Moments((self.square + weight * prior.hessian) * scale, cross)


def sums(x: Tensor, quantized: Tensor | None, square_weight: Tensor) -> Sums:
    """x, quantized: float32 [n, K]. square_weight: float32 [n], the g² of each token."""
    q = x if quantized is None else quantized
    weighted = q * square_weight[:, None]
    return Sums(
        weighted.T @ q,
        None if quantized is None else x.T @ weighted,
        float(square_weight.double().sum()),
    )


def layer_moments(samples: LayerSamples, device: torch.device) -> Moments:
    """The moments of all of a layer's tokens, each with the weight of its routing."""
    if samples.quantized is None and samples.second_moment is not None:
        return Moments(samples.second_moment.to(device))
    tokens, k = samples.x.shape
    square = torch.zeros(k, k, device=device)
    cross = None if samples.quantized is None else torch.zeros_like(square)
    weight = 0.0
    rows = max(1, _CHUNK // k)
    for at in range(0, tokens, rows):
        part = slice(at, at + rows)
        q = None if samples.quantized is None else rows_of(samples.quantized[part], device)
        found = sums(rows_of(samples.x[part], device), q, samples.token_weight[part].to(device))
        square += found.square
        weight += found.weight
        if cross is not None and found.cross is not None:
            cross += found.cross
    return Sums(square, cross, weight).moments()


def prior_tokens(samples: LayerSamples) -> Tensor:
    """Evenly spaced tokens of a layer, int64, at most `PRIOR_TOKENS`."""
    step = max(1, -(-samples.tokens // PRIOR_TOKENS))
    return torch.arange(0, samples.tokens, step)


def rows_of(stored: Tensor, device: torch.device) -> Tensor:
    """Stored rows as float32 on `device`."""
    return stored.to(device).float()
