"""The windows that `moet eval` runs: of a text that is given, or those held out beside a model."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from moet.calibrate import cut_windows
from moet.checkpoints import Checkpoint
from moet.cli.windows import given_tokens, vocabulary
from moet.errors import CheckpointError, ConfigError
from moet.eval.heldout import BIN, JSON, HeldOut, read_heldout

TOKENS = 32_768
WINDOW = 512


def chosen_windows(
    checkpoint: Checkpoint,
    tokens: Path | None,
    text: Path | None,
    count: int | None,
    window: int | None,
) -> HeldOut:
    """Windows as the command's options of these names say, two or more of a segment.

    A text is one segment, named as its file. Raises a MoetError naming the option or the file.
    """
    if tokens is None and text is None:
        found = _held_out(checkpoint, count, window)
    else:
        stream, path = given_tokens(checkpoint, tokens, text)
        cut = cut_windows(stream, count or TOKENS, window or WINDOW, path)
        found = HeldOut((path.name,), cut.ids[None].astype(np.int64))
    segments, windows, length = found.tokens.shape
    if windows < 2:
        raise ConfigError(
            f"a standard error takes two windows: {2 * segments * length:,} tokens in windows of "
            f"{length:,}{f', of {segments} kinds of text' if segments > 1 else ''}.",
            "Raise --count, make --window shorter, or give more text.",
        )
    return found


def _held_out(checkpoint: Checkpoint, count: int | None, window: int | None) -> HeldOut:
    """The model's own: of each segment the first windows, of each window the first tokens."""
    if not (checkpoint.path / JSON).exists():
        raise ConfigError(
            f"{checkpoint.path} has no held-out windows ({JSON}).",
            "Give a text with --text FILE, or token ids with --tokens FILE.",
        )
    found = read_heldout(checkpoint.path)
    segments, windows, length = found.tokens.shape
    if window is not None and window > length:
        raise ConfigError(
            f"--window {window}: the held-out windows of {checkpoint.name} have {length} tokens.",
            "Make it shorter, or give a text with --text FILE.",
        )
    known = vocabulary(checkpoint)
    if found.tokens.max(initial=0) >= known:
        raise CheckpointError(
            f"{checkpoint.path / BIN}: has token {found.tokens.max()}, but the model's vocabulary "
            f"has {known}.",
            "Give a text with --text FILE.",
        )
    length = window or length
    kept = windows if count is None else count // (segments * length)
    return HeldOut(found.segments, found.tokens[:, :kept, :length])
