"""Checkpoints on this machine: a directory, or what the hub's cache holds of a name."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from moet.errors import CheckpointError


def local_checkpoint(
    model: str, revision: str | None = None, cache: str | Path | None = None
) -> Path:
    """The directory of a checkpoint: given as such, or by a hub name already downloaded.

    revision: of the hub's repository; a directory has only one. cache: where to look instead of
    the hub's own cache. Raises CheckpointError when there is neither.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path.resolve()
    try:
        return Path(
            snapshot_download(model, revision=revision, cache_dir=cache, local_files_only=True)
        )
    except (LocalEntryNotFoundError, HFValidationError):
        which = f" --revision {revision}" if revision else ""
        raise CheckpointError(
            f"{model}: no such directory, and no downloaded model of that name.",
            f"Download it first: hf download {model}{which}",
        ) from None
