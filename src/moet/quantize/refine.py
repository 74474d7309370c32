"""Two ways to lower (q − w)ᵀ H (q − w) from a base that is there: all scales, or single codes."""

from __future__ import annotations

import torch
from torch import Tensor

from moet.quantize.base import BLOCK
from moet.quantize.rounding import BlockScale, Draft, levels_of, round_scale

_RIDGE = 1e-3  # of the mean diagonal: pulls a scale that the data does not determine to what it was
_KEEP = 1e-4  # of its size, by which a code's present value is favoured
_CHUNK = 2**24  # elements of the normal matrices [rows, K / 32, K / 32] at once


def fit_scales(draft: Draft, target: Tensor, hessian: Tensor) -> Draft:
    """All scales of a row by joint least squares at the codes as they are, then rounded to E4M3.

    target: W [N, K]. hessian: [K, K]. A row's scales solve a system of K / 32 equations. Where a
    solution is negative, the block's codes change sign instead, which is the same matrix.
    """
    blocks = target.shape[1] // BLOCK
    rows = max(1, _CHUNK // blocks**2)
    scale = torch.cat(
        [
            _fit(
                draft.levels[at : at + rows],
                draft.scale[at : at + rows],
                target[at : at + rows],
                hessian,
            )
            for at in range(0, len(target), rows)
        ]
    )
    sign = torch.where(scale < 0, -1.0, 1.0)
    rounded = round_scale(scale.abs(), draft.factor)
    return Draft(draft.levels * sign.repeat_interleave(BLOCK, 1), rounded, draft.factor)


def _fit(levels: Tensor, scale: Tensor, target: Tensor, hessian: Tensor) -> Tensor:
    n, k = levels.shape
    blocks = k // BLOCK
    normal = levels.new_empty(n, blocks, blocks)
    for b in range(blocks):
        at = slice(b * BLOCK, (b + 1) * BLOCK)
        product = (levels[:, at] @ hessian[at]) * levels
        normal[:, b] = product.reshape(n, blocks, BLOCK).sum(2)
    right = ((target @ hessian) * levels).reshape(n, blocks, BLOCK).sum(2)
    ridge = _RIDGE * normal.diagonal(dim1=1, dim2=2).mean(1, keepdim=True)
    normal.diagonal(dim1=1, dim2=2).add_(ridge)
    lower, info = torch.linalg.cholesky_ex(normal)
    solved = torch.cholesky_solve((right + ridge * scale)[..., None], lower)[..., 0]
    good = (info == 0) & torch.isfinite(solved).all(1)
    return torch.where(good[:, None], solved, scale)


def descend(draft: Draft, target: Tensor, hessian: Tensor) -> Draft:
    """One sweep of coordinate descent: every code in turn takes the level that is then best.

    Never increases the error but for rounding of float32. hessian: its diagonal must be positive.
    """
    levels = draft.levels.clone()
    slope = (draft.values() - target) @ hessian
    steps = hessian.diagonal().reciprocal().tolist()
    for b in range(target.shape[1] // BLOCK):
        at = slice(b * BLOCK, (b + 1) * BLOCK)
        scale = draft.scale[:, b : b + 1]
        rounding = BlockScale.of(scale[:, 0])
        inner = hessian[at, at, None]
        old = (levels[:, at] * scale).T.contiguous()
        slopes, change = slope[:, at].T.contiguous(), torch.empty_like(old)
        new = torch.empty_like(old)
        # A weight whose input is never used has no best sign; it keeps the one it has.
        favoured = old * (1 + _KEEP)
        for j in range(BLOCK):
            best = torch.sub(favoured[j], slopes[j], alpha=steps[b * BLOCK + j])
            rounding.nearest(best, out=new[j])
            torch.sub(new[j], old[j], out=change[j])
            slopes[j + 1 :].addcmul_(inner[j, j + 1 :], change[j])
        levels[:, at] = levels_of(new.T, scale)
        slope += change.T @ hessian[at]
    return Draft(levels, draft.scale, draft.factor)
