"""Held-out windows: where they are cut, and the files they are stored in."""

from __future__ import annotations

import json

import numpy as np
import pytest

from moet.errors import CheckpointError
from moet.eval.heldout import BIN, JSON, cut_segments, read_heldout, write_heldout

STREAM = np.arange(1000, dtype=np.uint16)
SEGMENTS = {"prose": (0, 600), "code": (600, 1000)}


def test_windows_are_evenly_spaced_within_their_segment():
    heldout = cut_segments(STREAM, SEGMENTS, count=3, length=50)
    assert heldout.segments == ("prose", "code")
    assert heldout.tokens.shape == (2, 3, 51)
    # Steps of (600 − 50 − 2) div 3 and (400 − 50 − 2) div 3.
    assert heldout.tokens[0, :, 0].tolist() == [0, 182, 364]
    assert heldout.tokens[1, :, 0].tolist() == [600, 716, 832]
    assert np.array_equal(heldout.tokens[1, 2], np.arange(832, 883))


def test_files_give_back_what_was_written(tmp_path):
    heldout = cut_segments(STREAM, SEGMENTS, count=4, length=16)
    write_heldout(tmp_path, heldout, "counting")
    found = read_heldout(tmp_path)
    assert found.segments == heldout.segments
    assert np.array_equal(found.tokens, heldout.tokens)
    assert json.loads((tmp_path / JSON).read_text())["note"] == "counting"
    assert (tmp_path / BIN).stat().st_size == 2 * 4 * 17 * 2


def test_missing_windows(tmp_path):
    with pytest.raises(CheckpointError, match=r"heldout\.json is missing"):
        read_heldout(tmp_path)


@pytest.mark.parametrize("about", ["{", "[]", '{"segments": ["a"], "shape": [1, 2, 99]}'])
def test_files_that_do_not_fit(tmp_path, about):
    write_heldout(tmp_path, cut_segments(STREAM, SEGMENTS, 2, 8), "")
    (tmp_path / JSON).write_text(about)
    with pytest.raises(CheckpointError, match="do not fit"):
        read_heldout(tmp_path)
