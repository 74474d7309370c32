"""Checks that every block format makes on its parts before it believes them.

Messages name the part and, where there is one, the index; the caller adds the tensor's full name.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moet.errors import CheckpointError, ConfigError, UnsupportedError
from moet.formats.base import Parts


def require(parts: Parts, name: str, dtypes: Sequence[torch.dtype]) -> Tensor:
    """The part `name`, contiguous, in one of `dtypes`; CheckpointError otherwise."""
    if name not in parts:
        raise CheckpointError(f"part {name!r} is missing.", f"Present: {', '.join(parts) or '-'}.")
    part = parts[name]
    if part.dtype not in dtypes:
        wanted = " or ".join(str(dtype) for dtype in dtypes)
        raise CheckpointError(f"part {name!r} has dtype {part.dtype}, expected {wanted}.")
    return part.contiguous()


def require_matrix(
    parts: Parts, name: str, dtypes: Sequence[torch.dtype], multiple: int = 1
) -> Tensor:
    """A part that is a matrix, not empty, whose rows are a multiple of `multiple` long."""
    part = require(parts, name, dtypes)
    if part.ndim != 2 or 0 in part.shape or part.shape[1] % multiple:
        rule = f" with a second dimension that {multiple} divides" if multiple > 1 else ""
        raise CheckpointError(
            f"part {name!r} has shape {tuple(part.shape)}, expected a non-empty matrix{rule}."
        )
    return part


def require_shape(part: Tensor, name: str, shape: tuple[int, ...]) -> None:
    """CheckpointError unless `part` has exactly this shape."""
    if tuple(part.shape) != shape:
        raise CheckpointError(
            f"part {name!r} has shape {tuple(part.shape)}, expected {shape} beside the other parts."
        )


def refuse_where(bad: Tensor, name: str, values: Tensor, rule: str) -> None:
    """CheckpointError naming the first index where `bad` holds, and the value there."""
    if bad.any():
        index = [int(i) for i in bad.nonzero()[0]]
        raise CheckpointError(
            f"part {name!r} holds {values[tuple(index)].item()} at {index}; {rule}."
        )


def require_scales(values: Tensor, name: str) -> None:
    """CheckpointError unless every scale is finite and ≥ 0; `values` are decoded, floating."""
    good = (values >= 0) & (values < torch.inf)
    refuse_where(~good, name, values, "a scale must be finite and not negative")


def require_finite(weight: Tensor, name: str) -> None:
    """CheckpointError unless every decoded weight is finite (float32 may be too small for it)."""
    # A sum is finite only if every term is; it is much faster than looking at each of them.
    if not torch.isfinite(weight.sum()):
        bad = ~torch.isfinite(weight)
        refuse_where(bad, name, weight, f"a weight must be a finite {weight.dtype} number")


def require_weight(weight: Tensor, multiple: int = 1) -> None:
    """What every encoder asks of W: a float32 matrix, finite, K a multiple of `multiple`."""
    if weight.dtype != torch.float32 or weight.ndim != 2 or 0 in weight.shape:
        raise ValueError(
            f"expected a non-empty float32 matrix, got {weight.dtype} {tuple(weight.shape)}"
        )
    if weight.shape[1] % multiple:
        raise UnsupportedError(
            f"a matrix of shape {tuple(weight.shape)} cannot be encoded in blocks of {multiple}."
        )
    require_finite(weight, "weight")


def require_rule(format_name: str, rule: str, known: Sequence[str]) -> None:
    """ConfigError unless `rule` is one of the format's scale rules."""
    if rule not in known:
        raise ConfigError(
            f"unknown scale rule {rule!r} of {format_name}.", f"Choose one of: {', '.join(known)}."
        )
