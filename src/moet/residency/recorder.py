"""Records a routing trace of a running server: what `moet simulate` takes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moet.residency.metrics import Phase
from moet.residency.tiers.trace import RoutingTrace

_LOG = logging.getLogger(__name__)

Lines = NDArray[np.int32]


class TraceRecorder:
    """Notes down which experts each step uses, up to a number of lines.

    A forward step with prompt tokens as well as tokens that decode becomes two steps of the trace:
    decode's, and one of the experts that only prompt tokens need. Written every `SAVE_EVERY` steps,
    in another thread, and at the end; a file that cannot be written is a warning.

    Args:
        path: of the file, which is replaced. layers: the model's indices. num_experts: of a layer.
        row_bytes: of a row. run: runs a job in another thread. most_lines: where recording ends
            (a line is a row that a step used, 12 bytes).
    """

    SAVE_EVERY = 1024
    MOST_LINES = 1 << 23

    def __init__(
        self,
        path: Path,
        layers: Sequence[int],
        num_experts: int,
        row_bytes: int,
        run: Callable[[Callable[[], None]], Future[None]],
        most_lines: int = MOST_LINES,
    ) -> None:
        self._path, self._layers, self._num_experts = path, tuple(layers), num_experts
        self._row_bytes, self._run, self._most_lines = row_bytes, run, most_lines
        shape = (len(self._layers), num_experts)
        # Of the step that runs. A draft layer runs several times in one.
        self._used = {phase: np.zeros(shape, np.bool_) for phase in Phase}
        self._prefill: list[bool] = []
        self._lines: list[Lines] = []  # int32 [lines, 2], layer and expert, of each step
        self._count = 0
        self._saved = 0  # steps that the file knows of
        self._full = False
        self._job: Future[None] | None = None

    def use(self, layer: int, decode: NDArray[np.int64], scan: NDArray[np.int64]) -> None:
        """The step uses these experts of the layer at index `layer`; no expert is in both."""
        self._used[Phase.DECODE][layer, decode] = True
        self._used[Phase.SCAN][layer, scan] = True

    def end_step(self) -> None:
        """Takes down the step, and saves in the background when it is time."""
        self._used[Phase.SCAN] &= ~self._used[Phase.DECODE]
        for phase in (Phase.DECODE, Phase.SCAN):
            used = self._used[phase]
            lines = np.argwhere(used).astype(np.int32)
            used[:] = False
            if len(lines) and not self._full:
                self._add(phase, lines)
        busy = self._job is not None and not self._job.done()
        if len(self._prefill) - self._saved >= self.SAVE_EVERY and not busy:
            self._saved = len(self._prefill)
            self._job = self._run(partial(self._save, list(self._prefill), list(self._lines)))

    def close(self) -> None:
        """Saves what is new; no background job may run any more."""
        if len(self._prefill) > self._saved:
            self._save(self._prefill, self._lines)

    def _add(self, phase: Phase, lines: Lines) -> None:
        if self._count + len(lines) > self._most_lines:
            self._full = True
            _LOG.warning(
                "routing trace %s: recording ends after %d steps, at %d rows used.",
                self._path, len(self._prefill), self._count,
            )  # fmt: skip
            return
        self._count += len(lines)
        self._prefill.append(phase == Phase.SCAN)
        self._lines.append(lines)

    def _save(self, prefill: Sequence[bool], lines: Sequence[Lines]) -> None:
        step = np.repeat(np.arange(len(lines), dtype=np.int32), [len(part) for part in lines])
        layer, expert = np.concatenate(lines).T.copy()
        trace = RoutingTrace(
            self._layers,
            self._num_experts,
            self._row_bytes,
            np.array(prefill, np.bool_),
            step,
            layer,
            expert,
        )
        try:
            trace.save(self._path)
        except OSError as error:
            _LOG.warning("routing trace %s cannot be written: %s.", self._path, error)
