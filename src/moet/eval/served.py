"""How far a served model is from a reference, on windows of text: from what engines told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moet.eval.fidelity import F64, mean_over_windows
from moet.eval.likeliest import Likeliest, kl_lower_bound, same_top1


@dataclass(frozen=True)
class ServedRow:
    """One segment, or all of them ("mean", each segment counting the same).

    tokens: that were predicted. nll_reference, nll: the loss of each on the text, nats a token;
    nll_change: their difference. top1: the fraction of tokens where both prefer the same next
    token. kl: a lower bound of KL(reference ‖ candidate), nats a token (`eval.likeliest`).
    …_se: standard errors over windows, that of the change over differences.
    """

    segment: str
    tokens: int
    nll_reference: float
    nll_reference_se: float
    nll: float
    nll_se: float
    nll_change: float
    nll_change_se: float
    top1: float
    top1_se: float
    kl: float
    kl_se: float


@dataclass(frozen=True)
class ServedFidelity:
    """A comparison on windows; the arrays are window means [segments, windows].

    tokens: predicted in a window.
    """

    segments: tuple[str, ...]
    tokens: int
    nll_reference: F64
    nll: F64
    top1: F64
    kl: F64

    def rows(self) -> list[ServedRow]:
        """A row a segment, and their mean where there are several."""
        rows = [self._row(name, slice(i, i + 1)) for i, name in enumerate(self.segments)]
        return rows if len(rows) == 1 else [*rows, self._row("mean", slice(None))]

    def _row(self, name: str, which: slice) -> ServedRow:
        return ServedRow(
            name,
            self.tokens * self.kl[which].size,
            *mean_over_windows(self.nll_reference[which]),
            *mean_over_windows(self.nll[which]),
            *mean_over_windows((self.nll - self.nll_reference)[which]),
            *mean_over_windows(self.top1[which]),
            *mean_over_windows(self.kl[which]),
        )


def compare_served(
    segments: tuple[str, ...], reference: Sequence[Likeliest], candidate: Sequence[Likeliest]
) -> ServedFidelity:
    """Compares what two engines told of the same windows, as many of each segment, in order."""

    def shaped(means: Sequence[np.floating]) -> F64:
        return np.array(means, np.float64).reshape(len(segments), -1)

    pairs = list(zip(reference, candidate, strict=True))
    return ServedFidelity(
        segments,
        len(reference[0].ids),
        shaped([of.nll.mean() for of in reference]),
        shaped([of.nll.mean() for of in candidate]),
        shaped([same_top1(*pair).mean() for pair in pairs]),
        shaped([kl_lower_bound(*pair).mean() for pair in pairs]),
    )
