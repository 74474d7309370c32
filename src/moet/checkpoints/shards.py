"""Where the bytes of a checkpoint's safetensors files are: on this machine, or on a hub."""

from __future__ import annotations

import os
import weakref
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path

from torch import Tensor

from moet.checkpoints.base import TensorRef
from moet.checkpoints.directory import open_shard
from moet.checkpoints.headers import Header, read_header
from moet.closing import Closing
from moet.errors import CheckpointError


class Shards(Closing):
    """The safetensors files of one checkpoint; a context manager. Reading is thread-safe.

    A reader that goes through the files one after another says so with `fetch` and `drop`, and then
    needs room for one file only. It may read what it has fetched and not dropped.

    Attributes:
        room: bytes of disk that reading takes, if files are dropped after use.
        ahead: how many files may be fetched before the first of them is dropped, beyond that one.
    """

    room: int = 0
    ahead: int = 0

    @property
    @abstractmethod
    def files(self) -> Sequence[str]:
        """The names of the files."""

    @abstractmethod
    def size(self, file: str) -> int:
        """Bytes of a file."""

    @abstractmethod
    def headers(self) -> list[Header]:
        """The files' headers, in the order of `files`; raises CheckpointError."""

    @abstractmethod
    def read(self, ref: TensorRef, buffer: Tensor) -> None:
        """Fills `buffer`, uint8 [ref.nbytes]; raises CheckpointError naming file and tensor."""

    @abstractmethod
    def fetch(self, file: str) -> None:
        """Makes a file readable, however long that takes."""

    @abstractmethod
    def drop(self, file: str, keep: Iterable[TensorRef] = ()) -> None:
        """Says that nothing of a fetched file will be read any more but the bytes of `keep`."""

    @abstractmethod
    def close(self) -> None:
        """Closes what is open; reading afterwards is an error."""


class LocalShards(Shards):
    """Files of a directory, opened once; raises CheckpointError when one cannot be."""

    ahead = 1  # so that a file's last experts do not keep others waiting

    def __init__(self, path: Path, files: Iterable[str]) -> None:
        self._path = path
        self._open: dict[str, int] = {}
        self._sizes: dict[str, int] = {}
        weakref.finalize(self, close_files, self._open)
        try:
            for file in files:
                self._open[file] = open_shard(path / file)
                self._sizes[file] = os.fstat(self._open[file]).st_size
        except BaseException:
            self.close()
            raise

    @property
    def files(self) -> Sequence[str]:
        return list(self._sizes)

    def size(self, file: str) -> int:
        return self._sizes[file]

    def headers(self) -> list[Header]:
        return [read_header(file, fd) for file, fd in self._open.items()]

    def read(self, ref: TensorRef, buffer: Tensor) -> None:
        if not self._open:
            raise CheckpointError(f"checkpoint {self._path} is closed.")
        read_exactly(self._open[ref.file], buffer, ref)

    def fetch(self, file: str) -> None:
        pass

    def drop(self, file: str, keep: Iterable[TensorRef] = ()) -> None:
        pass

    def close(self) -> None:
        close_files(self._open)


def read_exactly(fd: int, buffer: Tensor, ref: TensorRef) -> None:
    """Fills `buffer`, uint8, with the tensor's bytes; a call may return fewer than asked for."""
    view, done = buffer.numpy().data, 0
    while done < ref.nbytes:
        try:
            got = os.preadv(fd, [view[done:]], ref.offset + done)
        except OSError as error:
            raise CheckpointError(
                f"{ref.file}: tensor {ref.name!r} cannot be read: {error.strerror}."
            ) from None
        if got == 0:
            raise CheckpointError(
                f"{ref.file}: tensor {ref.name!r} ends early; the file was cut while it was open.",
                "Download this file again.",
            )
        done += got


def close_files(files: dict[str, int]) -> None:
    """Closes the descriptors in `files` and empties it."""
    while files:
        os.close(files.popitem()[1])
