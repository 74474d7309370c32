"""How hot each expert is: decayed counts of decode steps, and the file that outlives a restart."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from moet.errors import ConfigError
from moet.pack.files import write_file

_VERSION = "1"
_LOG = logging.getLogger(__name__)


class Heat:
    """Decayed use of every expert: Σ over the decode steps that used it of 2^−(age / half-life).

    Kept as a base-2 logarithm scaled to step 0, where ageing changes no entry: a touch costs what
    it touches, and two experts compare alike at any time.

    Args:
        counts: decayed counts to begin with, float [layers, experts], ≥ 0.
        half_life: in steps.
    """

    def __init__(self, counts: NDArray[np.floating], half_life: float) -> None:
        if not half_life > 0:
            raise ConfigError(f"a half-life of {half_life} steps is not positive.")
        self.log = np.full(counts.shape, -np.inf)
        np.log2(counts, out=self.log, where=counts > 0)
        self._half_life = half_life
        self.decode_steps = 0  # steps touched since the start
        self._step = -1

    def touch(self, layer: int | NDArray[np.int64], experts: NDArray[np.int64], step: int) -> None:
        """Decode used `experts` (each once) of the layer at index `layer` in `step`.

        layer may also be int64 [n], the layer of each expert.
        """
        if experts.size == 0:
            return
        self.log[layer, experts] = np.logaddexp2(self.log[layer, experts], step / self._half_life)
        self.decode_steps += step != self._step
        self._step = step

    def counts(self, step: int) -> NDArray[np.float32]:
        """The decayed counts as of `step`: [layers, experts]."""
        return np.exp2(self.log - step / self._half_life).astype(np.float32)


def save_heat(
    path: Path, identity: str, layers: Sequence[int], counts: NDArray[np.float32]
) -> None:
    """Replaces the heat file at once: a reader, or a kill, sees the old file or the new one.

    Args:
        identity: of the row source (`RowSource.identity`).
        layers: the model's indices of the layers. counts: float32 [layers, experts].

    Raises OSError.
    """
    counts = np.ascontiguousarray(counts)
    metadata = {
        "moet_heat": _VERSION,
        "identity": identity,
        "layers": _join(layers),
        "blake3": blake3(counts.tobytes()).hexdigest(),
    }
    write_file(path, save({"counts": counts}, metadata))


def load_heat(
    path: Path, identity: str, layers: Sequence[int], num_experts: int
) -> NDArray[np.float32] | None:
    """The counts in a heat file, float32 [layers, experts].

    None when there is no file, and, with a warning, when it is damaged or of other rows: heat only
    ever saves time, so the server starts cold instead.
    """
    try:
        with safe_open(path, "np") as file:
            metadata, counts = file.metadata() or {}, file.get_tensor("counts")
        problem = _problem(metadata, counts, identity, layers, num_experts)
    except FileNotFoundError:
        return None
    except (OSError, SafetensorError) as error:
        problem = f"cannot be read ({error})"
    if problem:
        _LOG.warning("heat file %s %s: ignored, starting cold.", path, problem)
        return None
    result: NDArray[np.float32] = counts
    return result


def _problem(
    metadata: Mapping[str, str],
    counts: NDArray[np.generic],
    identity: str,
    layers: Sequence[int],
    num_experts: int,
) -> str:
    """Why a heat file cannot be used; empty if it can."""
    if metadata.get("moet_heat") != _VERSION:
        return "is of another version"
    if metadata.get("identity") != identity:
        return "is of another pack"
    shape = (len(layers), num_experts)
    if metadata.get("layers") != _join(layers) or counts.shape != shape:
        return "is of other layers"
    digest = blake3(counts.tobytes()).hexdigest()
    if counts.dtype != np.float32 or digest != metadata.get("blake3"):
        return "is damaged"
    return ""


def _join(layers: Sequence[int]) -> str:
    return ",".join(map(str, layers))


class HeatKeeper:
    """Decides when the heat file is written: behind the server's back, and only by a warm one.

    A server that was started and stopped must not replace what a long run has learnt, so nothing
    is written before `WARM_STEPS` steps have decoded. Counts steps, not time. A file that cannot
    be written is a warning.

    Args:
        path, identity, layers: as of `save_heat`. run: runs a job in another thread.
    """

    WARM_STEPS = 32
    SAVE_EVERY = 1024

    def __init__(
        self,
        heat: Heat,
        path: Path,
        identity: str,
        layers: Sequence[int],
        run: Callable[[Callable[[], None]], Future[None]],
    ) -> None:
        self._heat, self._path, self._identity, self._layers = heat, path, identity, layers
        self._run = run
        self._saved = 0  # decode steps that the file knows of
        self._job: Future[None] | None = None

    def end_step(self, step: int) -> None:
        """Saves in the background when it is time; the counts are copied here."""
        busy = self._job is not None and not self._job.done()
        if self._heat.decode_steps - self._saved >= self.SAVE_EVERY and not busy:
            self._saved = self._heat.decode_steps
            self._job = self._run(partial(self._save, self._heat.counts(step)))

    def close(self, step: int) -> None:
        """Saves what is new; no background job may run any more."""
        if self._heat.decode_steps >= self.WARM_STEPS:
            self._save(self._heat.counts(step))

    def _save(self, counts: NDArray[np.float32]) -> None:
        try:
            save_heat(self._path, self._identity, self._layers, counts)
        except OSError as error:
            _LOG.warning("heat file %s cannot be written: %s.", self._path, error)
