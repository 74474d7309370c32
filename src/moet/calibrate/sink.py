"""Where the workers that run the model leave what they see: straight in the file, at its place."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from moet.calibrate.layout import CalibrationLayout, Place
from moet.closing import Closing
from moet.pack.files import write_exact


class SampleSink(Closing):
    """Writes samples of the windows of one file; a context manager that owns the open file.

    Windows run one after the other, each as one request, so that a layer's tokens come in order.
    Ranks of a pipeline may write to the same file: each has layers of its own.

    Args:
        path: the unfinished calibration, made by `CalibrationWriter`.
    """

    def __init__(self, path: Path, layout: CalibrationLayout) -> None:
        self._layout = layout
        self._fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        self._window = 0
        self.seen: dict[int, int] = {}
        self.broken: list[int] = []

    @property
    def hidden(self) -> int:
        """Width of an input."""
        return self._layout.metadata.hidden

    def begin(self, window: int) -> None:
        """From now on tokens belong to this window. `seen` counts them by layer, and `broken`
        lists the layers whose inputs were not finite."""
        self._window, self.seen, self.broken = window, {}, []

    def add(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        """The next tokens of the window: x [n, hidden], ids and weights [n, k]."""
        length = self._layout.metadata.window
        at = self.seen.get(layer, 0)
        self.seen[layer] = at + len(x)
        if at + len(x) > length:
            return  # the counts tell that something else ran as well
        if not bool(torch.isfinite(x).all()) or not bool(torch.isfinite(weights).all()):
            self.broken.append(layer)
        row = self._window * length + at
        for name, values in (
            ("inputs", x.to(torch.bfloat16)),
            ("experts", ids.to(torch.int32)),
            ("weights", weights.to(torch.float32)),
        ):
            self._write(self._layout.place(layer, name), row, values)

    def power(self, layer: int, value: float) -> None:
        """Mean |h|² of the residual stream at a layer's entry, in this window."""
        place = self._layout.place(layer, "stream_power")
        self._write(place, self._window, torch.tensor([value], dtype=torch.float64, device="cpu"))

    def sync(self) -> None:
        """Returns when everything is on disk."""
        os.fsync(self._fd)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _write(self, place: Place, row: int, values: Tensor) -> None:
        raw = values.contiguous().cpu().view(torch.uint8).numpy()
        write_exact(self._fd, raw.tobytes(), place.offset + row * place.row_bytes)
