"""Which tokens of a step are being decoded: residency treats their experts differently."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray


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
