"""How far a model with cheaper experts is from the model itself: KL and top-1 agreement."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from moet.eval.heldout import HeldOut

F64 = NDArray[np.float64]


@dataclass(frozen=True)
class Row:
    """One segment, or all of them ("mean", each segment counting the same).

    kl: KL(reference ‖ candidate) in nats a token. kl_se: its standard error over windows.
    top1: the fraction of tokens where both prefer the same next token. nll: the candidate's loss on
    the text, nats a token.
    """

    segment: str
    kl: float
    kl_se: float
    top1: float
    nll: float


@dataclass(frozen=True)
class Fidelity:
    """A comparison on held-out windows; kl, top1 and nll are window means [segments, windows]."""

    segments: tuple[str, ...]
    kl: F64
    top1: F64
    nll: F64

    def rows(self) -> list[Row]:
        """A row a segment, and their mean."""
        rows = [self._row(name, slice(i, i + 1)) for i, name in enumerate(self.segments)]
        return [*rows, self._row("mean", slice(None))]

    def _row(self, name: str, which: slice) -> Row:
        top1, nll = (float(values[which].mean()) for values in (self.top1, self.nll))
        return Row(name, *mean_over_windows(self.kl[which]), top1, nll)

    def kl_difference(self, other: Fidelity) -> tuple[float, float]:
        """Mean KL minus that of `other` on the same windows, and the paired standard error.

        Windows differ far more than schemes do, so this tells two schemes apart when `kl_se` of
        each cannot.
        """
        return mean_over_windows(self.kl - other.kl)


@torch.no_grad()
def compare(
    reference: nn.Module, candidate: nn.Module, heldout: HeldOut, batch: int = 4
) -> Fidelity:
    """Runs both models on every window and compares their next-token distributions.

    batch: windows in one forward pass.
    """
    segments, windows, _ = heldout.tokens.shape
    flat = torch.from_numpy(heldout.tokens).flatten(0, 1)
    parts = list(_compare(reference, candidate, flat, batch))
    kl, top1, nll = (
        torch.cat(p).double().numpy().reshape(segments, windows) for p in zip(*parts, strict=True)
    )
    return Fidelity(heldout.segments, kl, top1, nll)


def _compare(
    reference: nn.Module, candidate: nn.Module, tokens: Tensor, batch: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    for chunk in torch.split(tokens, batch):
        p, q = (
            m(chunk[:, :-1], use_cache=False).logits.log_softmax(-1) for m in (reference, candidate)
        )
        kl = (p.exp() * (p - q)).sum(-1)
        agree = (p.argmax(-1) == q.argmax(-1)).float()
        nll = -q.gather(-1, chunk[:, 1:, None])[..., 0]
        yield kl.mean(-1), agree.mean(-1), nll.mean(-1)


def mean_over_windows(windows: F64) -> tuple[float, float]:
    """Mean over segments of the mean over windows, and its standard error over windows."""
    errors = windows.std(1, ddof=1) / np.sqrt(windows.shape[1])
    return float(windows.mean()), float(np.sqrt((errors**2).sum()) / len(windows))
