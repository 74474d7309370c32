"""Level 2's first pass: the base by error feedback (GPTQ, arXiv 2210.17323), and what it needs.

With H = E[x xᵀ] of a matrix's input, the output error of a row is (q − w)ᵀ H (q − w). Columns are
rounded one after the other, and the error of each is spread over the columns that are still open,
in the way that costs the output least: with U the upper Cholesky factor of H⁻¹, by U[j, j+1:] /
U[j, j]. The scale of a block is chosen when its first column is reached, for the weights as they
then are, with every error weighted by what it will cost: 1 / U[j, j]².
"""

from __future__ import annotations

import torch
from torch import Tensor

from moet.quantize.base import BLOCK, SCALE_MAX_BYTE, SCALE_MIN_BYTE
from moet.quantize.rounding import BlockScale, Draft, levels_of, scale_table

# E4M3 numbers from 0.55 max|w| down to 1/16 of it and less.
_CANDIDATES = 32
_TOP = 0.55
# Elements of [rows, candidates, 32] at once.
_CHUNK = 2**24


def inverse_factor(hessian: Tensor) -> Tensor | None:
    """U, upper triangular, with H⁻¹ = Uᵀ U; None where H is not positive definite to float32."""
    lower, info = torch.linalg.cholesky_ex(hessian)
    if int(info) != 0:
        return None
    upper: Tensor
    upper, info = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
    return upper if int(info) == 0 and bool(torch.isfinite(upper).all()) else None


def best_scale(weight: Tensor, cost: Tensor, factor: Tensor) -> Tensor:
    """The allowed scale of least Σ cost · (w − q)², each weight at its nearest code; [N, 1].

    weight: [N, 32]. cost: [32] or [N, 32], positive. A block that zeros serve better gets 0.
    """
    rows = max(1, _CHUNK // (_CANDIDATES * BLOCK))
    parts = [
        _best_scale(weight[at : at + rows], cost[at : at + rows] if cost.ndim == 2 else cost, f)
        for at in range(0, len(weight), rows)
        for f in (factor[at : at + rows],)
    ]
    return torch.cat(parts)


def _best_scale(weight: Tensor, cost: Tensor, factor: Tensor) -> Tensor:
    table = scale_table(weight.device)
    size = weight.abs()
    ratio = _TOP * size.amax(1, keepdim=True) / factor
    top = torch.searchsorted(table[: SCALE_MAX_BYTE + 1], ratio, right=True) - 1
    byte = top.clamp(min=SCALE_MIN_BYTE + _CANDIDATES - 1) - torch.arange(
        _CANDIDATES, device=weight.device
    )
    scale = table[byte] * factor  # [N, candidates]
    q = torch.where(size[:, None] > 2.5 * scale[..., None], 4.0, 1.0) * scale[..., None]
    error = ((size[:, None] - q).square() * (cost[:, None] if cost.ndim == 2 else cost)).sum(2)
    least, which = error.min(1, keepdim=True)
    zero = (size.square() * cost).sum(1, keepdim=True) <= least
    return torch.where(zero, 0.0, scale.gather(1, which))


def error_feedback(weight: Tensor, inverse: Tensor, factor: Tensor) -> Draft:
    """The base of W [N, K] by error feedback; `inverse` is `inverse_factor` of its Hessian.

    A zero takes the sign of the error that reaches it. Where none does (inputs that no token uses),
    signs alternate, so that zeros lean to no side.
    """
    open_, k = torch.where(weight == 0, _alternating(weight), weight), weight.shape[1]
    levels = torch.empty_like(weight)
    scales = weight.new_empty(len(weight), k // BLOCK)
    for start in range(0, k, BLOCK):
        stop = start + BLOCK
        u = inverse[start:stop, start:stop]
        block = open_[:, start:stop]
        cost = u.diagonal().square().reciprocal()
        scale = best_scale(block, cost, factor)
        scales[:, start // BLOCK] = scale[:, 0]
        spread = (u / u.diagonal()[:, None])[:, :, None]
        rounding = BlockScale.of(scale[:, 0])
        # Columns as rows, so that each is contiguous.
        columns = block.T.contiguous()
        values, errors = torch.empty_like(columns), torch.empty_like(columns)
        for j in range(BLOCK):
            rounding.nearest(columns[j], out=values[j])
            torch.sub(columns[j], values[j], out=errors[j])
            columns[j + 1 :].addcmul_(spread[j, j + 1 :], errors[j], value=-1)
        levels[:, start:stop] = levels_of(values.T, scale)
        if stop < k:
            open_[:, stop:] -= (errors.T / u.diagonal()) @ inverse[start:stop, stop:]
    return Draft(levels, scales, factor)


def _alternating(like: Tensor) -> Tensor:
    """±the smallest normal float32 by turns along rows and columns: a sign, and no value."""
    n, k = like.shape
    turn = torch.arange(n, device=like.device)[:, None] + torch.arange(k, device=like.device)
    return torch.where(turn % 2 == 0, 1.0, -1.0) * torch.finfo(torch.float32).tiny
