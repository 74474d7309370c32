"""Which kernels a call goes through: the faster ones by a model of their times.

Random routing chooses E · (1 − (1 − k/E)^tokens) of E experts. A launch of the decode kernel takes
a fixed time, and time for each of them and its weights; prefill takes longer for the weights. But a
launch of the decode kernel takes few tokens, and the next reads their experts anew.

The constants are fitted to bench/results/dispatch-h200.json, between layers at 2 bits and at FP4:
precisions are in a device table, which the host does not read. Other GPUs were not measured.
"""

from __future__ import annotations

from moet.kernels.cuda.shape import ExpertsShape

DECODE_TOKENS = 16
"""The most tokens of a launch of the decode kernel as compiled for few."""

SEVERAL_TOKENS = 32
"""The most of a launch as compiled for several."""

_DECODE_US = 11.0
_DECODE_EXPERT_US = 0.416
_DECODE_WEIGHTS_PER_US = 11.7e6
_PREFILL_US = 29.0
_PREFILL_WEIGHTS_PER_US = 4.14e6


def decode_us(shape: ExpertsShape, tokens: int, launch_tokens: int) -> float:
    """µs of decoding so many tokens in launches of `launch_tokens`."""
    full, rest = divmod(tokens, launch_tokens)
    experts = full * _chosen(shape, launch_tokens) + _chosen(shape, rest)
    each = _DECODE_EXPERT_US + _weights(shape) / _DECODE_WEIGHTS_PER_US
    return (full + (rest > 0)) * _DECODE_US + experts * each


def prefill_us(shape: ExpertsShape, tokens: int) -> float:
    """µs of prefilling so many tokens."""
    return _PREFILL_US + _chosen(shape, tokens) * _weights(shape) / _PREFILL_WEIGHTS_PER_US


def most_decoded(shape: ExpertsShape, launch_tokens: int) -> int:
    """Up to so many tokens, launches of the decode kernel for `launch_tokens` each are faster."""
    tokens = min(DECODE_TOKENS, launch_tokens)
    while decode_us(shape, tokens + 1, launch_tokens) <= prefill_us(shape, tokens + 1):
        tokens += 1
    return tokens


def _chosen(shape: ExpertsShape, tokens: int) -> float:
    """The expected number of experts that so many tokens choose."""
    experts = shape.num_experts
    return experts * (1 - (1 - shape.top_k / experts) ** tokens)


def _weights(shape: ExpertsShape) -> int:
    """Of one expert."""
    return 3 * shape.hidden * shape.intermediate
