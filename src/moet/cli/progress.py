"""The progress bar of packing and verifying: bytes, GB/s, time left, layers."""

from __future__ import annotations

from types import TracebackType

from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from moet.cli.ui import err
from moet.pack.progress import Work


class Bar:
    """Draws `moet.pack.progress` events on standard error; no terminal: a line a layer.

    Args:
        verb: what the run does, as the bar's label ("packing").
    """

    def __init__(self, verb: str) -> None:
        self._verb = verb
        self._layers = self._done = 0
        self._file = ""
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=err,
            disable=not err.is_terminal,
        )
        self._task = self._bar.add_task(verb, total=None)

    def __enter__(self) -> Bar:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def start(self, work: Work) -> None:
        self._layers, self._done = work.layers, work.layers_done
        self._bar.update(self._task, total=work.read, description=self._label())
        if work.layers_done:
            err.print(f"resuming: {work.layers_done} of {work.layers} layers are already written")

    def fetch(self, file: str, size: int) -> None:
        self._file = file
        self._bar.update(self._task, description=self._label())
        if not err.is_terminal:
            err.print(f"{self._verb}: {file}")

    def advance(self, read: int, written: int) -> None:
        self._bar.advance(self._task, read)

    def finish_layer(self, layer: int) -> None:
        self._done += 1
        self._bar.update(self._task, description=self._label())
        if not err.is_terminal:
            err.print(f"{self._verb}: layer {layer} done ({self._done} of {self._layers})")

    def _label(self) -> str:
        layer = f"{self._verb} layer {min(self._done + 1, self._layers)}/{self._layers}"
        return f"{layer} {self._file}".rstrip()
