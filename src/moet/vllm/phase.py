"""What a layer must know of a step's tokens: which are being decoded, which run at FP4."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_FP4_TOKENS = "moet_fp4_tokens"


@dataclass(eq=False)
class Fp4Tokens:
    """Tokens of a forward pass all of whose experts run at FP4.

    tokens: bool [tokens of the pass, without padding]. again: the pass repeats what the step has
    computed before.
    """

    tokens: NDArray[np.bool_]
    again: bool
    _on_device: Tensor | None = field(default=None, init=False)

    def padded(self, num_tokens: int) -> NDArray[np.bool_]:
        """bool [num_tokens]; padding runs at no precision in particular."""
        marks = np.zeros(num_tokens, np.bool_)
        marks[: len(self.tokens)] = self.tokens
        return marks

    @cached_property
    def all(self) -> bool:
        """Whether all tokens are marked; then padding runs at FP4, too."""
        return bool(self.tokens.all())

    def padded_on(self, num_tokens: int, device: torch.device) -> Tensor:
        """`padded` on the device, copied once: all layers of a pass have as many tokens."""
        if self._on_device is None or len(self._on_device) != num_tokens:
            self._on_device = torch.from_numpy(self.padded(num_tokens)).to(device)
        return self._on_device


def mark_fp4_tokens(context: Any, marks: Fp4Tokens) -> None:
    """Tells the layers that run in this forward context."""
    context.additional_kwargs[_FP4_TOKENS] = marks


def fp4_tokens(context: Any) -> Fp4Tokens | None:
    """What `mark_fp4_tokens` said of this forward context, if anything."""
    marks: Fp4Tokens | None = context.additional_kwargs.get(_FP4_TOKENS)
    return marks


def decode_tokens(attn_metadata: Any, num_tokens: int, decode_length: int) -> NDArray[np.bool_]:
    """True for the tokens of requests that decode, False for prefill and padding: [num_tokens].

    Residency only: the same rows are computed either way. A prompt's last chunk that is as short as
    a decode step counts as one.

    Args:
        attn_metadata: the forward context's, by layer name; None in warm-up runs, all of whose
            tokens count as prefill.
        num_tokens: tokens in the step, padding included.
        decode_length: the most tokens of a request in a decode step: 1 + speculative tokens.
    """
    decode = np.zeros(num_tokens, np.bool_)
    starts = _query_starts(attn_metadata)
    if starts is not None:
        lengths = np.diff(starts)
        # Padding follows the last request; some backends also pad the list of requests, by
        # repeating its end.
        marks = np.repeat(lengths <= decode_length, lengths)[:num_tokens]
        decode[: len(marks)] = marks
    return decode


def _query_starts(attn_metadata: Any) -> NDArray[np.int64] | None:
    """Where each request's tokens begin, and the end: int64 [requests + 1].

    Every attention backend's metadata has it under this name; all layers of a step share it.
    """
    if not isinstance(attn_metadata, Mapping):
        return None
    for metadata in attn_metadata.values():
        starts = getattr(metadata, "query_start_loc", None)
        if starts is not None:
            return np.asarray(starts.cpu().numpy(), np.int64)
    return None


def longest_decode(vllm_config: Any) -> int:
    """The most tokens of one request in a decode step: 1 + speculative tokens."""
    speculative = vllm_config.speculative_config
    return 1 + (speculative.num_speculative_tokens if speculative is not None else 0)
