"""The text to calibrate on, as windows of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from moet.errors import CalibrationError

I32 = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Windows:
    """Evenly spaced windows of a token stream: int32 [windows, length]."""

    ids: I32

    @property
    def digest(self) -> str:
        return blake3(self.ids.astype("<i4").tobytes()).hexdigest()


def read_tokens(path: Path, vocabulary: int) -> I32:
    """Token ids from a file: `.npy` (one dimension, integers), or else raw little-endian uint16,
    uint32 where the vocabulary has more than 65,536 entries.

    Raises CalibrationError naming the file, and the first id that the model has not.
    """
    try:
        if path.suffix == ".npy":
            found: NDArray[Any] = np.load(path, allow_pickle=False)
        else:
            found = np.fromfile(path, "<u2" if vocabulary <= 2**16 else "<u4")
    except (OSError, ValueError) as error:
        raise CalibrationError(
            f"{path}: cannot be read as tokens ({error}).", "Give the text itself with --text."
        ) from None
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise CalibrationError(
            f"{path}: has {found.dtype} {list(found.shape)}, not a row of token ids.",
            "Save one dimension of integers.",
        )
    bad = (found < 0) | (found >= vocabulary)
    if bad.any():
        at = int(bad.argmax())
        raise CalibrationError(
            f"{path}: token {at} is {found[at]}, but the model's vocabulary has {vocabulary}.",
            "Make the tokens with this model's tokenizer, or give the text itself with --text.",
        )
    return found.astype(np.int32)


def read_text(path: Path, model: Path) -> I32:
    """A UTF-8 text file in tokens of the model's own tokenizer.

    Raises CalibrationError naming the file that is missing or no text.
    """
    from transformers import AutoTokenizer

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CalibrationError(
            f"{path}: cannot be read as text ({error}).", "Give a text file in UTF-8."
        ) from None
    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise CalibrationError(
            f"{model}: its tokenizer cannot be loaded ({error}).", "Give tokens with --tokens."
        ) from None
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return np.array(ids, np.int32)


def cut_windows(stream: I32, total: int, length: int, path: Path) -> Windows:
    """Evenly spaced windows of `length` tokens, about `total` tokens in all, none twice.

    Raises CalibrationError where the stream is shorter than one window.
    """
    count = min(total, len(stream)) // length
    if count < 1:
        raise CalibrationError(
            f"{path}: has {len(stream):,} tokens; a window takes {length:,}, and {total:,} are "
            "asked for.",
            "Give more text, ask for more tokens, or make the window shorter.",
        )
    starts = np.arange(count) * (len(stream) // count)
    return Windows(np.stack([stream[at : at + length] for at in starts]))
