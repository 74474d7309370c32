"""Complete layers made durable while later ones are packed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from moet.closing import Closing
from moet.pack.layer_writer import LayerWriter
from moet.pack.manifest import Fp4, LayerEntry
from moet.pack.progress import Progress
from moet.pack.workspace import Workspace


class Finisher(Closing):
    """Finishes layers one after another in a thread of its own, and journals them: a sync takes
    about as long as reading the layer did. All methods are for the thread that made it.

    Args:
        check: called before a layer is finished, in that thread; raises what speaks against it.
    """

    def __init__(
        self, workspace: Workspace, progress: Progress, check: Callable[[], None] | None
    ) -> None:
        self.entries: list[LayerEntry] = []
        self._workspace, self._progress, self._check = workspace, progress, check
        self._pool = ThreadPoolExecutor(1, "moet-finish")
        self._running: deque[Future[tuple[LayerEntry, int]]] = deque()

    def begin(self, writer: LayerWriter, fp4: Fp4) -> None:
        """Has a complete layer finished; raises for an earlier one that could not be."""
        self._running.append(self._pool.submit(self._finish, writer, fp4))
        while self._running and self._running[0].done():
            self._journal()

    def settle(self) -> None:
        """Waits for all layers begun; raises for the first that could not be finished."""
        while self._running:
            self._journal()

    def close(self) -> None:
        """Drops the layers that are not settled."""
        self._pool.shutdown(cancel_futures=True)

    def _journal(self) -> None:
        entry, written = self._running.popleft().result()
        self._workspace.add(entry)
        self.entries.append(entry)
        self._progress.advance(0, written)
        self._progress.finish_layer(entry.layer)

    def _finish(self, writer: LayerWriter, fp4: Fp4) -> tuple[LayerEntry, int]:
        try:
            if self._check is not None:
                self._check()
            return writer.finish(fp4)
        finally:
            writer.close()
