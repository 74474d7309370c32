"""KL and agreement of two models from the likeliest tokens that each of them names.

A server tells no whole distribution, only its likeliest tokens. Those that both models name are
outcomes of their own here, and all others together are one: two distributions over the same few
outcomes. By the data-processing inequality their KL is a lower bound of that of the whole ones,
and the same where all tokens are named.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]

_ROUNDING = 1e-7  # of what is left of 1 after float32 log-probabilities


@dataclass(frozen=True, eq=False)
class Likeliest:
    """What a model says of the next token, at each position of a window.

    ids: int32 [positions, 1 + K], the token that follows in the text, then K tokens, most likely
    first. logprobs: float64 likewise, natural logarithms.
    """

    ids: NDArray[np.int32]
    logprobs: F64

    @property
    def nll(self) -> F64:
        """The loss on the text, nats: [positions]."""
        return -self.logprobs[:, 0]


def same_top1(reference: Likeliest, candidate: Likeliest) -> NDArray[np.bool_]:
    """Where both prefer the same next token: [positions]."""
    return np.asarray(reference.ids[:, 1] == candidate.ids[:, 1])


def kl_lower_bound(reference: Likeliest, candidate: Likeliest) -> F64:
    """KL(reference ‖ candidate) over the tokens that both name, the others as one: nats,
    [positions]. The text's own token is named by both, likely or not."""
    q, named = _find(reference, candidate)
    # Where the text's token is among the likeliest, it counts there.
    named[:, 0] &= ~(reference.ids[:, 1:] == reference.ids[:, :1]).any(1)
    p = reference.logprobs
    kl: F64 = np.where(named, np.exp(p) * (p - q), 0.0).sum(1)
    p_rest, q_rest = (
        np.maximum(1 - np.where(named, np.exp(of), 0.0).sum(1), _ROUNDING) for of in (p, q)
    )
    kl += p_rest * np.log(p_rest / q_rest)
    return kl


def _find(reference: Likeliest, candidate: Likeliest) -> tuple[F64, NDArray[np.bool_]]:
    """The candidate's log-probability of the reference's tokens, and of which it tells one:
    [positions, 1 + K]."""
    vocabulary = 1 + max(int(reference.ids.max()), int(candidate.ids.max()))
    row = np.arange(len(reference.ids), dtype=np.int64)[:, None] * vocabulary
    wanted, told = row + reference.ids, (row + candidate.ids).ravel()
    order = np.argsort(told)
    at = np.minimum(np.searchsorted(told[order], wanted), told.size - 1)
    place = order[at]
    return candidate.logprobs.ravel()[place], told[place] == wanted
