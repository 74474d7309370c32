"""The unfinished calibration: one writer, resumed after a kill, published when it is complete.

The file has its final size and header from the start, under the name OUT.partial; workers write
samples at their places (`sink`). OUT.journal says how many windows are on disk.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, ValidationError

from moet.calibrate.layout import CONFIDENCE_BINS, CalibrationLayout, Metadata
from moet.calibrate.reader import Calibration
from moet.calibrate.tokens import Windows
from moet.closing import Closing
from moet.errors import CalibrationError
from moet.pack.files import sync_directory, write_exact, write_file
from moet.pack.manifest import differences
from moet.pack.strict import Strict
from moet.quantize import LayerSamples
from moet.quantize.moments import layer_moments
from moet.units import byte_size


class Journal(Strict):
    """How far a run has come."""

    metadata: Metadata
    windows: Annotated[int, Field(ge=0)]


class CalibrationWriter(Closing):
    """Makes the calibration `out`; a context manager that holds the unfinished file's lock.

    Args:
        windows: the tokens, which `metadata` names by their digest.

    Attributes:
        partial: the unfinished file. layout: of it. done: windows that an earlier run finished.

    Raises CalibrationError when `out` exists or an unfinished one of another kind or version is
    there (unless `overwrite`), when another process writes it, and when the disk has too little
    room.
    """

    def __init__(
        self, out: Path, metadata: Metadata, windows: Windows, *, overwrite: bool = False
    ) -> None:
        self.out, self.layout, self._windows = out, CalibrationLayout(metadata), windows
        self.partial = out.with_name(out.name + ".partial")
        self.done = 0
        self._journal = out.with_name(out.name + ".journal")
        self._overwrite = overwrite
        self._fd = -1

    def __enter__(self) -> CalibrationWriter:
        if self.out.exists() and not self._overwrite:
            raise CalibrationError(
                f"{self.out}: exists already.", "Choose another name, or allow overwriting it."
            )
        try:
            self._fd = os.open(self.partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self._start()
        except OSError as error:
            self.close()
            raise CalibrationError(
                f"{self.partial}: cannot be written ({error.strerror}).",
                "Make room, or choose a directory that you can write to.",
            ) from None
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        """Releases the lock; what is written stays, for the next run."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def record(self, windows: int) -> None:
        """Journals that the first `windows` windows are on disk."""
        journal = Journal(metadata=self.layout.metadata, windows=windows)
        write_file(self._journal, journal.model_dump_json().encode())

    def finish(self) -> Calibration:
        """Sums every layer up and publishes the file."""
        unchecked = Calibration(self.partial, self.layout)
        for layer in self.layout.metadata.layers:
            for name, values in summary(unchecked.samples(layer, None), self.layout).items():
                write_exact(self._fd, values.tobytes(), self.layout.place(layer, name).offset)
            digest = unchecked.layer_digest(layer)
            write_exact(self._fd, digest, self.layout.place(layer, "blake3").offset)
        os.fsync(self._fd)
        self.partial.replace(self.out)
        self._journal.unlink()
        sync_directory(self.out.parent)
        return Calibration.open(self.out)

    def _start(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CalibrationError(
                f"{self.out}: another process is writing it.",
                "Wait for it, or choose another name.",
            ) from None
        if self._resume():
            return
        self._journal.unlink(missing_ok=True)
        os.ftruncate(self._fd, 0)
        status = os.fstatvfs(self._fd)
        free, size = status.f_bavail * status.f_frsize, self.layout.file_bytes
        if free < size:
            raise CalibrationError(
                f"{self.out}: takes {byte_size(size)}, but its disk has {byte_size(free)} free.",
                "Choose another disk, or lower --budget.",
            )
        os.truncate(self._fd, size)
        write_exact(self._fd, self.layout.header, 0)
        write_exact(self._fd, self._windows.ids.astype("<i4").tobytes(), self.layout.tokens.offset)
        unseen = np.full(self.layout.metadata.windows, np.nan)
        for layer in self.layout.metadata.layers:
            place = self.layout.place(layer, "stream_power")
            write_exact(self._fd, unseen.tobytes(), place.offset)
        os.fsync(self._fd)
        self.record(0)

    def _resume(self) -> bool:
        """Whether an earlier run's file is there and goes on; if another's is, only `overwrite`
        lets this one start anew."""
        journal = self._journal.read_bytes() if self._journal.exists() else None
        size = os.fstat(self._fd).st_size
        if journal is None or not size:
            return False  # nothing was recorded, or the samples are gone
        try:
            found = Journal.model_validate_json(journal)
        except ValidationError:
            changes = ["it was made by another version of moet"]
        else:
            changes = differences(self.layout.metadata, found.metadata)
            if not changes and size != self.layout.file_bytes:
                changes = [f"it has {size} bytes, not {self.layout.file_bytes}"]
        if changes and not self._overwrite:
            raise CalibrationError(
                f"{self.partial} is an unfinished calibration of another kind: "
                f"{'; '.join(changes)}.",
                "Delete it, or allow overwriting, to start anew.",
            )
        if not changes:
            self.done = found.windows
        return not changes


def summary(samples: LayerSamples, layout: CalibrationLayout) -> dict[str, NDArray[np.generic]]:
    """What the file tells of a layer as a whole, by tensor name."""
    ids, weights = samples.ids.numpy(), samples.weights.numpy()
    used = ids >= 0
    experts = layout.metadata.experts

    def by_expert(values: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.bincount(ids[used], values[used], minlength=experts).astype("<f8")

    total = np.where(used, weights, 0).sum(1)
    share = np.where(used, weights, 0).max(1) / np.where(total > 0, total, 1)
    bins = np.clip((share * CONFIDENCE_BINS).astype(np.int64), 0, CONFIDENCE_BINS - 1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return {
        "counts": np.bincount(ids[used], minlength=experts).astype("<i8"),
        "weight_sum": by_expert(weights.astype(np.float64)),
        "weight_square_sum": by_expert(weights.astype(np.float64) ** 2),
        "confidence": np.bincount(bins, minlength=CONFIDENCE_BINS).astype("<i8"),
        "second_moment": layer_moments(samples, device).hessian.cpu().numpy(),
    }
