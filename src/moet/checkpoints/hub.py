"""A checkpoint on a hub: headers by range requests, shards downloaded one at a time.

Speaks to the hub through huggingface_hub only, so that its endpoint, token, proxies and transfer
back ends are as the user has set them up.
"""

from __future__ import annotations

import os
import shutil
import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import (
    HfApi,
    hf_hub_download,
    hf_hub_url,
    snapshot_download,
    try_to_load_from_cache,
)
from huggingface_hub.utils import (  # type: ignore[attr-defined]
    build_hf_headers,
    hf_raise_for_status,
    http_backoff,
    tqdm,
)
from torch import Tensor

from moet.checkpoints.base import TensorRef
from moet.checkpoints.directory import INDEX, SINGLE, weight_map
from moet.checkpoints.headers import Header, parse_header
from moet.checkpoints.hub_errors import hub_errors
from moet.checkpoints.reader import Checkpoint
from moet.checkpoints.shards import Shards, close_files, read_exactly
from moet.errors import CheckpointError

SCHEME = "hf://"
CONFIGS = ("config.json", "hf_quant_config.json", INDEX)
KEEP_LIMIT = 1 << 30  # bytes of experts between two shards that are kept in memory, not on disk
_CONNECTIONS = 8  # that ask for headers at once
_HEADER_GUESS = 1 << 18  # most headers come with the first request
# What a served checkpoint consists of besides its shards.
_SMALL_FILES = ["*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken"]


class HubShards(Shards):
    """The shards of one commit of a hub repository.

    A shard is downloaded when it is fetched and deleted when it is dropped; one that the Hugging
    Face cache has already is read there and stays. The parts that `drop` is told to keep are held
    in memory up to 1 GiB; beyond, the shard stays on disk until it is dropped without.

    Args:
        repository, commit: which. sizes: bytes of each shard. directory: for downloads, or None to
            download into the Hugging Face cache and delete nothing.
    """

    def __init__(
        self,
        repository: str,
        commit: str,
        sizes: dict[str, int],
        directory: Path | None,
        endpoint: str | None,
    ) -> None:
        self._repository, self._commit, self._sizes = repository, commit, sizes
        self._directory, self._endpoint = directory, endpoint
        self._open: dict[str, int] = {}
        self._headers: dict[str, bytes] = {}
        self._kept: dict[str, dict[int, Tensor]] = {}
        weakref.finalize(self, close_files, self._open)
        if directory is not None:
            missing = (size for file, size in sizes.items() if self._cached(file) is None)
            self.room = max(missing, default=0)

    @property
    def files(self) -> Sequence[str]:
        return list(self._sizes)

    def size(self, file: str) -> int:
        return self._sizes[file]

    def headers(self) -> list[Header]:
        def request(file: str) -> Header:
            ranges = _Ranges(self._url(file), self._repository)
            return parse_header(file, self._sizes[file], ranges)

        with ThreadPoolExecutor(_CONNECTIONS) as pool:
            headers = list(pool.map(request, self._sizes))
        self._headers = {header.file: header.raw for header in headers}
        return headers

    def read(self, ref: TensorRef, buffer: Tensor) -> None:
        kept = self._kept.get(ref.file, {}).get(ref.offset)
        if kept is not None:
            buffer.copy_(kept)
            return
        if ref.file not in self._open:
            raise CheckpointError(f"{ref.file} of {self._repository} has not been downloaded.")
        read_exactly(self._open[ref.file], buffer, ref)

    def fetch(self, file: str) -> None:
        if file in self._open:
            return
        self._delete_others(file)
        path = self._cached(file) or self._download(file)
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._open[file] = fd
        raw = self._headers[file]
        if os.fstat(fd).st_size != self._sizes[file] or os.pread(fd, len(raw), 8) != raw:
            raise CheckpointError(
                f"{path} is not what {self._repository} has at {self._commit}.",
                "Delete it and run the same command again.",
            )

    def drop(self, file: str, keep: Iterable[TensorRef] = ()) -> None:
        keep = list(keep)
        held = sum(part.nbytes for parts in self._kept.values() for part in parts.values())
        if keep and held + sum(ref.nbytes for ref in keep) > KEEP_LIMIT:
            return
        parts = {}
        for ref in keep:
            parts[ref.offset] = torch.empty(ref.nbytes, dtype=torch.uint8, device="cpu")
            self.read(ref, parts[ref.offset])
        self._kept[file] = parts
        if file in self._open:
            os.close(self._open.pop(file))
        if self._directory is not None:
            (self._directory / file).unlink(missing_ok=True)

    def close(self) -> None:
        close_files(self._open)
        self._kept.clear()

    def delete(self) -> None:
        """Removes the directory of the downloads, if there is one, and all that it holds."""
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _delete_others(self, file: str) -> None:
        """Deletes shards that an earlier, killed run has left in the directory."""
        if self._directory is not None:
            for other in self._sizes.keys() - self._open.keys() - {file}:
                (self._directory / other).unlink(missing_ok=True)

    def _cached(self, file: str) -> Path | None:
        found = try_to_load_from_cache(self._repository, file, revision=self._commit)
        return Path(found) if isinstance(found, str) else None

    def _download(self, file: str) -> Path:
        with hub_errors(self._repository):
            return Path(
                hf_hub_download(
                    self._repository,
                    file,
                    revision=self._commit,
                    local_dir=self._directory,
                    endpoint=self._endpoint,
                    tqdm_class=_NoBar,
                )
            )

    def _url(self, file: str) -> str:
        return hf_hub_url(self._repository, file, revision=self._commit, endpoint=self._endpoint)


class _NoBar(tqdm):
    """No progress bar of the hub's: it would be drawn across the caller's own."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options | {"disable": True})  # type: ignore[no-untyped-call]


class _Ranges:
    """(offset, length) → bytes of a file on the hub; the first 256 KiB come with one request."""

    def __init__(self, url: str, repository: str) -> None:
        self._url, self._repository = url, repository
        self._first = self._request(0, _HEADER_GUESS)

    def __call__(self, offset: int, length: int) -> bytes:
        if offset + length <= len(self._first):
            return self._first[offset : offset + length]
        return self._request(offset, length)

    def _request(self, offset: int, length: int) -> bytes:
        wanted = {"Range": f"bytes={offset}-{offset + length - 1}", "Accept-Encoding": "identity"}
        with hub_errors(self._repository):
            headers = {**build_hf_headers(), **wanted}
            response = http_backoff("GET", self._url, headers=headers)
            if response.status_code == 416:  # an empty file
                return b""
            hf_raise_for_status(response)
        if response.status_code != 206:
            raise CheckpointError(
                f"{self._repository}: the hub does not answer requests for a range of bytes.",
                "Download the model first: hf download " + self._repository,
            )
        content: bytes = response.content
        return content


def open_hub(
    name: str, directory: Path, *, endpoint: str | None = None, keep: bool = False
) -> Checkpoint:
    """Opens a checkpoint on a hub; no shard is downloaded before it is fetched.

    Args:
        name: `hf://OWNER/NAME`, with `@REVISION` for another than the main branch.
        directory: for what is downloaded; `HubShards.delete` removes it. endpoint: the hub's
            address; default: huggingface_hub's own. keep: download into the Hugging Face cache
            instead, and keep it.

    Raises CheckpointError as `Checkpoint.open` does, and when the hub cannot be reached or has no
    such model.
    """
    repository, _, revision = name.removeprefix(SCHEME).partition("@")
    with hub_errors(repository):
        info = HfApi(endpoint=endpoint).model_info(
            repository, revision=revision or None, files_metadata=True
        )
    commit, siblings = str(info.sha), {of.rfilename: of.size for of in info.siblings or []}
    if keep:
        with hub_errors(repository):
            path = Path(
                snapshot_download(
                    repository,
                    revision=revision or None,
                    allow_patterns=_SMALL_FILES,
                    endpoint=endpoint,
                    tqdm_class=_NoBar,
                )
            )
    else:
        path = directory
        _remove_incomplete(path)
        with hub_errors(repository):
            for file in CONFIGS:
                if file in siblings:
                    hf_hub_download(
                        repository,
                        file,
                        revision=commit,
                        local_dir=path,
                        endpoint=endpoint,
                        tqdm_class=_NoBar,
                    )
    if INDEX not in siblings and SINGLE not in siblings:
        raise CheckpointError(
            f"{repository} has neither {SINGLE} nor {INDEX}.",
            "moet reads safetensors checkpoints in the Hugging Face layout.",
        )
    table = weight_map(path) if INDEX in siblings else None
    sizes = {}
    for file in sorted(set(table.values())) if table else [SINGLE]:
        size = siblings.get(file)
        if size is None:
            raise CheckpointError(f"{repository} has no {file}, which its index names.")
        sizes[file] = size
    shards = HubShards(repository, commit, sizes, None if keep else path, endpoint)
    return Checkpoint.assemble(path, repository, commit, table, shards)


def _remove_incomplete(directory: Path) -> None:
    """Deletes what a killed download left: huggingface_hub begins anew, in another file."""
    for file in directory.glob(".cache/huggingface/download/*.incomplete"):
        file.unlink(missing_ok=True)
