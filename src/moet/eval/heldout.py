"""Held-out token windows, cut once and stored beside a model.

`heldout.bin` is uint16 [segments, windows, tokens + 1]; `heldout.json` says the shape, the
segments' names and where the text is from.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moet.errors import CheckpointError

BIN, JSON = "heldout.bin", "heldout.json"


@dataclass(frozen=True)
class HeldOut:
    """Windows of text that the model was not trained on.

    segments: kinds of text. tokens: int64 [segments, windows, tokens + 1]; each window predicts
    its last `tokens` tokens from the ones before.
    """

    segments: tuple[str, ...]
    tokens: NDArray[np.int64]

    def first(self, windows: int) -> HeldOut:
        """The same with only the first `windows` of each segment."""
        return HeldOut(self.segments, self.tokens[:, :windows])

    @property
    def flat(self) -> NDArray[np.int32]:
        """The windows of all segments, one after the other: [segments · windows, tokens + 1]."""
        return self.tokens.reshape(-1, self.tokens.shape[2]).astype(np.int32)


def cut_segments(
    stream: NDArray[np.uint16], segments: dict[str, tuple[int, int]], count: int, length: int
) -> HeldOut:
    """`count` windows of `length` + 1 tokens from each segment, evenly spaced from its start.

    segments: name → [start, end) in `stream`.
    """
    windows = [
        [
            stream[at : at + length + 1].astype(np.int64)
            for i in range(count)
            for at in (start + i * ((end - start - length - 2) // count),)
        ]
        for start, end in segments.values()
    ]
    return HeldOut(tuple(segments), np.array(windows))


def write_heldout(directory: Path, heldout: HeldOut, note: str) -> None:
    """Writes `heldout.bin` and `heldout.json`; `note` says where the text is from."""
    segments, windows, length = heldout.tokens.shape
    (directory / BIN).write_bytes(heldout.tokens.astype("<u2").tobytes())
    about = {
        "dtype": "uint16",
        "shape": [segments, windows, length],
        "segments": list(heldout.segments),
        "note": note,
    }
    (directory / JSON).write_text(json.dumps(about, indent=2) + "\n")


def read_heldout(directory: Path) -> HeldOut:
    """The windows in a model's directory.

    Raises CheckpointError when there are none, or when the two files do not belong together.
    """
    try:
        about = json.loads((directory / JSON).read_text())
        tokens = np.fromfile(directory / BIN, dtype="<u2")
        names = tuple(str(name) for name in about["segments"])
        segments, windows, length = about["shape"]
        if segments != len(names):
            raise ValueError("as many names as segments are meant")
        return HeldOut(names, tokens.reshape(segments, windows, length).astype(np.int64))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{error.filename} is missing.", "Fidelity is measured on a model's held-out windows."
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{directory / JSON} and {BIN} do not fit: {error}.") from None
