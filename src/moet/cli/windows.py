"""What commands that run a text in windows share: the text that is given, the progress bar."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from moet.calibrate import read_text, read_tokens
from moet.checkpoints import Checkpoint
from moet.checkpoints.keys import integer
from moet.cli.ui import err
from moet.errors import CalibrationError
from moet.plan.inventory import text_config


def given_tokens(
    checkpoint: Checkpoint, tokens: Path | None, text: Path | None
) -> tuple[NDArray[np.int32], Path]:
    """The tokens that `--tokens` or `--text` names, int32 [tokens], and their file.

    Raises CalibrationError unless just one of the two is given, and for a file that does not do.
    """
    if (tokens is None) == (text is None):
        raise CalibrationError("one of --tokens and --text must be given.")
    if tokens is not None:
        return read_tokens(tokens, vocabulary(checkpoint)), tokens
    assert text is not None
    return read_text(text, checkpoint.path), text


def vocabulary(checkpoint: Checkpoint) -> int:
    """How many tokens the model knows."""
    return integer(text_config(checkpoint.config), "vocab_size")


class WindowBar:
    """A progress bar of windows, as a context manager whose value is called with windows done."""

    def __init__(self, verb: str, total: int) -> None:
        self._total, self._verb = total, verb
        self._bar = Progress(
            TextColumn(f"{verb}, window"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=err,
            disable=not err.is_terminal,
        )
        self._task = self._bar.add_task(verb, total=total)

    def __enter__(self) -> WindowBar:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def __call__(self, done: int) -> None:
        self._bar.update(self._task, completed=done)
        if not err.is_terminal and (done == self._total or done % max(1, self._total // 20) == 0):
            err.print(f"{self._verb}: {done} of {self._total} windows")
