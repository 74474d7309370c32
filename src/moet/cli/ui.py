"""What the subcommands share on the screen: consoles, byte counts, JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from rich.console import Console

from moet.errors import CheckpointError

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


def size(count: float) -> str:
    """A byte count in binary units: `27.0 KiB`, `72.6 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} TiB"


def emit_json(content: Any) -> None:
    """Machine-readable output: the only thing on standard output when `--json` is given."""
    print(json.dumps(content, indent=1, sort_keys=True))


def resolve_model(model: str, revision: str | None = None) -> Path:
    """The directory of a checkpoint: given as such, or by a hub name already downloaded.

    revision: of the hub's repository; a directory has only one.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path.resolve()
    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        which = f" --revision {revision}" if revision else ""
        raise CheckpointError(
            f"{model}: no such directory, and no downloaded model of that name.",
            f"Download it first: hf download {model}{which}",
        ) from None
