"""What a long run over a pack tells its caller; the command line draws a bar from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Work:
    """What a run is going to do, in bytes.

    read: bytes of the checkpoint (packing) or of the pack and checkpoint (verifying).
    written: bytes of the pack; 0 when verifying. layers: MoE layers of the model.
    layers_done: layers that an earlier, interrupted run has finished; not in the bytes.
    """

    read: int
    written: int
    layers: int
    layers_done: int


class Progress(Protocol):
    """Receives events, always in the thread that started the run."""

    def start(self, work: Work) -> None:
        """Called once, before the first byte."""

    def fetch(self, file: str, size: int) -> None:
        """Called before a file of the checkpoint is read, and if need be downloaded; its bytes."""

    def advance(self, read: int, written: int) -> None:
        """Called after each expert with the bytes it read and wrote."""

    def finish_layer(self, layer: int) -> None:
        """Called when a layer is safely on disk, or verified."""


class Silent:
    """Tells nobody."""

    def start(self, work: Work) -> None:
        pass

    def fetch(self, file: str, size: int) -> None:
        pass

    def advance(self, read: int, written: int) -> None:
        pass

    def finish_layer(self, layer: int) -> None:
        pass
