"""Which tokens are decided again: a function of each request alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moet.vllm.gate.stopwatch import Stopwatch
from moet.vllm.stats import Figure

_FLIPS_KEPT = 1024  # second passes


class Gate:
    """Threshold, cap, what has been decided again, and the counts.

    A token fires when the probability of its most likely successor is below `tau`; when `tau` is 1
    or more, every token does. Of a request's tokens, from the last of its prompt on, at most the
    share `cap` may fire, counted up to each one: the cap, like everything here, sees one request,
    so its neighbours change nothing.

    Which positions of a running request have fired is remembered: when vLLM preempts the request,
    it computes them again, and they run at FP4 again.
    """

    def __init__(self, tau: float = 0.0, cap: float = 1.0) -> None:
        self.tau, self.cap = tau, cap
        self._fired: dict[str, list[int]] = {}  # by request, ascending positions
        self._reset()

    def _reset(self) -> None:
        self.steps = 0  # steps in which a token was asked for
        self.gated_steps = 0
        self.replays = 0  # second passes that were a CUDA graph's replay
        self.tokens = 0  # asked for
        self.fired = 0
        self.stopwatch = Stopwatch()  # of second passes
        self._flipped = 0
        self._flips: list[Tensor] = []  # not counted yet: bool [n] each

    @property
    def everything(self) -> bool:
        """All tokens fire, those of prompts included."""
        return self.tau >= 1 and self.cap >= 1

    def set(self, tau: float, cap: float) -> None:
        """From the next step on; positions that have fired stay so."""
        self.tau, self.cap = tau, cap

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """For vLLM's warm-up requests: they fire as often as can be, and nothing is counted."""
        tau, cap = self.tau, self.cap
        self.set(float(np.nextafter(1, 0)), 1.0)
        try:
            yield
        finally:
            self.set(tau, cap)
            self._fired.clear()
            self._reset()

    def decide(
        self,
        requests: Sequence[str],
        positions: NDArray[np.int64],
        first: NDArray[np.int64],
        confidence: NDArray[np.float32],
        again: bool = True,
    ) -> NDArray[np.bool_]:
        """Which of a step's tokens fire, one token a request: bool [n].

        Args:
            requests: their ids. positions: of the tokens, [n]. first: of the last token of each
                prompt, [n]. confidence: probability of the most likely successor, [n]. again:
                whether a second pass follows for those that fire.
        """
        fires = np.zeros(len(requests), np.bool_)
        doubtful = confidence < self.tau if self.tau < 1 else ~fires
        for index in doubtful.nonzero()[0].tolist():
            fired = self._fired.setdefault(requests[index], [])
            position, asked = int(positions[index]), int(positions[index] - first[index]) + 1
            fires[index] = position in fired[-1:]  # asked twice, if vLLM dropped the step
            if not fires[index] and len(fired) + 1 <= self.cap * asked:
                fired.append(position)
                fires[index] = True
        self.steps += 1
        self.tokens += len(requests)
        self.gated_steps += bool(again and fires.any())
        self.fired += int(np.count_nonzero(fires))
        return fires

    def decided_again(self, request: str, begin: int, end: int) -> list[int]:
        """Positions in [begin, end) that have fired."""
        return [position for position in self._fired.get(request, ()) if begin <= position < end]

    def forget(self, requests: Iterable[str]) -> None:
        """These requests have ended."""
        for request in requests:
            self._fired.pop(request, None)

    def count_flips(self, before: Tensor, after: Tensor) -> None:
        """Of tokens that fired, the most likely successors: int [n] each. Added up later, since to
        look at them now would be to wait for the second pass."""
        self._flips.append(before != after)
        if len(self._flips) == _FLIPS_KEPT:
            self._flipped = self.flipped
            self._flips.clear()

    @property
    def flipped(self) -> int:
        """Tokens that fired and have another most likely successor now. Waits for the device."""
        return self._flipped + (int(torch.cat(self._flips).sum()) if self._flips else 0)

    def figures(self) -> list[Figure]:
        """For the rank's statistics. Waits for the device."""
        replays = "Of these, second passes that were a CUDA graph's replay."
        counters = {
            "gate_steps": ("Steps whose tokens the gate has looked at.", self.steps),
            "gate_second_passes": ("Of these, steps with a second pass.", self.gated_steps),
            "gate_replays": (replays, self.replays),
            "gate_tokens": ("Tokens that the gate has looked at.", self.tokens),
            "gate_fired": ("Of these, tokens decided again at FP4.", self.fired),
            "gate_flipped": ("Of these, tokens with another most likely successor.", self.flipped),
            "gate_seconds": ("Seconds that second passes took.", self.stopwatch.seconds),
        }
        return [
            *(Figure(name, about, value) for name, (about, value) in counters.items()),
            Figure("gate_tau", "The gate's threshold.", self.tau, "gauge"),
            Figure("gate_cap", "The gate's cap.", self.cap, "gauge"),
        ]


def most_likely(logits: Tensor) -> tuple[NDArray[np.float32], Tensor]:
    """The most likely successors: their probabilities, float32 [n], and which, int64 [n].

    logits: [n, vocabulary]. Waits for the device. Ranks that hold the same logits get the same
    bits, and so does a token whatever others are beside it.
    """
    top = torch.softmax(logits, -1, dtype=torch.float32).max(-1)
    return np.asarray(top.values.cpu().numpy(), np.float32), top.indices


def known_at_fp4(
    requests: Sequence[str],
    computed: NDArray[np.integer],
    lengths: NDArray[np.integer],
    prompts: NDArray[np.integer],
    pieces: NDArray[np.bool_],
    gate: Gate | None,
    prompts_fp4: bool,
) -> NDArray[np.bool_] | None:
    """The tokens of a step that run at FP4 whatever their logits: bool [tokens], or None for none.

    They are prompts' tokens, where that is set, and those that fired before their request was
    preempted.

    Args:
        requests: ids, in the step's order. computed: tokens of each whose KV is in the cache.
        lengths: tokens of each in the step. prompts: tokens of each prompt. pieces: whether the
            step has not yet all of its tokens.
    """
    # A token that is decoded for the first time is decided by its logits.
    several = (lengths > 1) | (computed < prompts) | pieces
    if not several.any():
        return None
    marks = np.zeros(int(np.sum(lengths)), np.bool_)
    ends = np.cumsum(lengths)
    for index in several.nonzero()[0].tolist():
        begin = int(computed[index])
        end = begin + int(lengths[index])
        own = marks[int(ends[index]) - int(lengths[index]) : int(ends[index])]
        if prompts_fp4:
            own[: max(0, int(prompts[index]) - begin)] = True
        if gate is not None:
            for position in gate.decided_again(requests[index], begin, end):
                own[position - begin] = True
    return marks if marks.any() else None
