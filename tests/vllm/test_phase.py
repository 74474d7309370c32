"""Which tokens decode: from the attention metadata that every backend has."""

from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moet.vllm.phase import decode_tokens


def metadata(starts):
    return {"layer": SimpleNamespace(query_start_loc=torch.tensor(starts, dtype=torch.int32))}


def test_a_step_of_both_kinds_and_padding():
    # One token, five tokens, one token, then two tokens of padding.
    marks = decode_tokens(metadata([0, 1, 6, 7]), 9, decode_length=1)
    assert marks.tolist() == [True, *[False] * 5, True, False, False]


def test_speculative_tokens_are_decode():
    assert (
        decode_tokens(metadata([0, 3, 7]), 7, decode_length=3).tolist() == [True] * 3 + [False] * 4
    )


def test_without_metadata_everything_is_prefill():
    assert not decode_tokens(None, 4, decode_length=1).any()
    assert not decode_tokens({"layer": SimpleNamespace()}, 4, decode_length=1).any()
    assert not decode_tokens([{}], 4, decode_length=1).any()  # micro-batches


@settings(max_examples=50)
@given(st.lists(st.integers(0, 6), max_size=6), st.integers(0, 5), st.integers(1, 4))
def test_every_token_of_a_request_alike(lengths, padding, decode_length):
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(int).tolist()
    marks = decode_tokens(metadata(starts), starts[-1] + padding, decode_length)
    expected = [n <= decode_length for n in lengths for _ in range(n)] + [False] * padding
    assert marks.tolist() == expected
