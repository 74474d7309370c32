"""The files of a checkpoint directory: configs, index, shards."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from moet.checkpoints.base import TensorRef
from moet.checkpoints.headers import Header
from moet.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def repository_name(path: Path) -> tuple[str, str | None]:
    """(name, revision) of a checkpoint: from the Hugging Face cache's path, else (directory, None).

    The cache has `models--OWNER--NAME/snapshots/COMMIT`.
    """
    path = path.absolute()
    repository = path.parent.parent.name
    if path.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/"), path.name
    return path.name, None


def read_json(path: Path) -> tuple[bytes, dict[str, Any]]:
    """The bytes of a JSON file and the object in it.

    Raises CheckpointError when the file is missing, unreadable, or holds no JSON object.
    """
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is missing.", "Give the directory of a complete checkpoint."
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is damaged: it is not a JSON object.", "Download it again.")
    return raw, value


def weight_map(path: Path) -> dict[str, str] | None:
    """The index's tensor → shard table; None for a checkpoint of one `model.safetensors`.

    Raises CheckpointError for a directory without weights, and for a shard name that would lead
    out of the directory.
    """
    if not (path / INDEX).exists():
        if not (path / SINGLE).exists():
            raise CheckpointError(
                f"{path} has neither {SINGLE} nor {INDEX}.",
                "moet reads safetensors checkpoints in the Hugging Face layout.",
            )
        return None
    _, index = read_json(path / INDEX)
    table = index.get("weight_map")
    if not isinstance(table, dict) or not table:
        raise CheckpointError(f"{path / INDEX} has no `weight_map`.", "Download it again.")
    for name, file in table.items():
        if not isinstance(file, str) or file in ("", ".", "..") or "/" in file or "\0" in file:
            raise CheckpointError(f"{path / INDEX}: tensor {name!r} is in {file!r}, no file name.")
    return table


def open_shard(path: Path) -> int:
    """A read-only descriptor of a shard; raises CheckpointError when it cannot be opened."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise CheckpointError(
            f"shard {path} is missing.", "Finish the download of this checkpoint."
        ) from None
    except OSError as error:
        raise CheckpointError(f"shard {path} cannot be opened: {error.strerror}.") from None


def collect_tensors(
    headers: Iterable[Header], table: dict[str, str] | None
) -> dict[str, TensorRef]:
    """Every tensor by name; with an index, those that it lists.

    Raises CheckpointError when the index lists a tensor that its shard does not have.
    """
    shards = {header.file: header.tensors for header in headers}
    if table is None:
        return dict(shards[SINGLE])
    tensors = {}
    for name, file in table.items():
        ref = shards[file].get(name)
        if ref is None:
            raise CheckpointError(
                f"{INDEX} says that tensor {name!r} is in {file}, but it is not there.",
                "The index and the shards are of different downloads; download both again.",
            )
        tensors[name] = ref
    return tensors
