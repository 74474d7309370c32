"""What the planner reads of a model: config.json and safetensors headers, local or on the hub.

No weights are read. On the hub, headers come by HTTP range requests, and nothing stays in the cache
(an index without its shards there would look like a download that has begun).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from huggingface_hub import HfApi, hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    LocalEntryNotFoundError,
    SafetensorsParsingError,
)

from moet.checkpoints.directory import (
    INDEX,
    SINGLE,
    open_shard,
    read_json,
    repository_name,
    weight_map,
)
from moet.checkpoints.headers import DTYPE_BITS, read_header
from moet.checkpoints.hub_errors import hub_errors
from moet.errors import CheckpointError

CONFIG, MODELOPT = "config.json", "hf_quant_config.json"
_CONNECTIONS = 8
_INCOMPLETE = "Its upload is incomplete or damaged: choose another revision, or tell its makers."
# What huggingface_hub raises besides for JSON that describes no tensors.
_NO_HEADER = (AttributeError, RecursionError, TypeError)


class TensorInfo(NamedTuple):
    """A tensor as its header describes it; dtype in safetensors' names."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class ModelFiles:
    """A model that can be planned.

    name, revision: of the repository; revision is None where it is not known.
    config: config.json. modelopt: hf_quant_config.json, or None.
    local: whether the checkpoint is on this machine already.
    tensors: every tensor, shard after shard; reads the headers each time it is called.
    """

    name: str
    revision: str | None
    config: Mapping[str, Any]
    modelopt: Mapping[str, Any] | None
    local: bool
    tensors: Callable[[], Iterator[TensorInfo]]


def open_model(
    model: str, *, revision: str | None = None, endpoint: str | None = None
) -> ModelFiles:
    """A model by directory or by hub name.

    endpoint: the hub's address; default: huggingface_hub's own.
    Raises CheckpointError when there is neither, or when its files cannot be read.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return _local(path.resolve())
    if path.exists() or model.startswith((".", "/", "~")):
        raise CheckpointError(
            f"{model} is not a directory.", "Give a checkpoint's directory or a hub name."
        )
    return _remote(model, revision, endpoint)


def _local(path: Path) -> ModelFiles:
    _, config = read_json(path / CONFIG)
    modelopt = read_json(path / MODELOPT)[1] if (path / MODELOPT).exists() else None
    table = weight_map(path)
    name, revision = repository_name(path)

    def tensors() -> Iterator[TensorInfo]:
        for file in sorted(set(table.values())) if table else [SINGLE]:
            fd = open_shard(path / file)
            try:
                header = read_header(file, fd)
            finally:
                os.close(fd)
            for ref in header.tensors.values():
                if table is None or table.get(ref.name) == file:
                    yield TensorInfo(ref.name, ref.dtype, ref.shape, ref.nbytes)

    return ModelFiles(name, revision, config, modelopt, True, tensors)


def _remote(name: str, revision: str | None, endpoint: str | None) -> ModelFiles:
    config = _hub_json(name, revision, endpoint, CONFIG)
    if config is None:
        raise CheckpointError(f"{name} has no {CONFIG}.", "Is it a model repository?")
    modelopt = _hub_json(name, revision, endpoint, MODELOPT)
    index = _hub_json(name, revision, endpoint, INDEX)
    table = None if index is None else index.get("weight_map")
    if index is not None and not (
        isinstance(table, dict) and all(map(_is_file_name, table.values()))
    ):
        raise CheckpointError(f"{name}: {INDEX} has no `weight_map` of tensors to files.")
    api = HfApi(endpoint=endpoint)

    def header(file: str) -> list[TensorInfo]:
        with hub_errors(name):
            try:
                metadata = api.parse_safetensors_file_metadata(name, file, revision=revision)
            except EntryNotFoundError:
                raise CheckpointError(f"{name}: {file} is not on the hub.", _INCOMPLETE) from None
            except (SafetensorsParsingError, *_NO_HEADER) as error:
                raise CheckpointError(f"{name}: {file}: {error}", _INCOMPLETE) from None
        found = []
        for tensor, info in metadata.tensors.items():
            if table is not None and table.get(tensor) != file:
                continue
            if info.dtype not in DTYPE_BITS:
                raise CheckpointError(f"{name}: {file}: tensor {tensor!r} has dtype {info.dtype}.")
            begin, end = info.data_offsets
            if (end - begin) * 8 != math.prod(info.shape) * DTYPE_BITS[info.dtype]:
                raise CheckpointError(f"{name}: {file}: tensor {tensor!r} has an impossible size.")
            found.append(TensorInfo(tensor, info.dtype, tuple(info.shape), end - begin))
        return found

    def tensors() -> Iterator[TensorInfo]:
        files = sorted(set(table.values())) if table else [SINGLE]
        with ThreadPoolExecutor(_CONNECTIONS) as pool:
            for found in pool.map(header, files):
                yield from found

    return ModelFiles(name, revision, config, modelopt, False, tensors)


def _is_file_name(value: Any) -> bool:
    return isinstance(value, str) and value.endswith(".safetensors") and "/" not in value


def _hub_json(
    name: str, revision: str | None, endpoint: str | None, file: str
) -> dict[str, Any] | None:
    """The object in a JSON file of a repository; None when there is no such file."""
    with TemporaryDirectory(prefix="moet-plan-") as place:
        with hub_errors(name):
            try:
                path = hf_hub_download(
                    name, file, revision=revision, endpoint=endpoint, cache_dir=place
                )
            except LocalEntryNotFoundError:  # an EntryNotFoundError too: no answer
                raise
            except EntryNotFoundError:
                return None
        try:
            content = json.loads(Path(path).read_bytes())
        except (ValueError, RecursionError):
            content = None
    if not isinstance(content, dict):
        raise CheckpointError(f"{name}: {file} is damaged: it is not a JSON object.")
    return content
