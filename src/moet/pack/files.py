"""File access that the pack needs: exact reads and writes, O_DIRECT, durable directories."""

from __future__ import annotations

import errno
import mmap
import os
import stat
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moet.errors import ConfigError, MoetError, PackError
from moet.formats.layout import ROW_ALIGN

U8 = NDArray[np.uint8]

ENDS_EARLY = "the file ends early"
REMAKE = "Copy the pack again, or make it anew with `moet pack`."
RESUME = (
    "Make room or lift the limit, and run the same command again: it resumes after the last "
    "finished layer."
)


class StorageFile:
    """A file open for reading at offsets, by any number of threads; a context manager.

    Args:
        path: the file. error: the kind of error to raise. follow: whether it may be a symbolic
            link; a pack's files may not.
        direct: bypass the page cache (O_DIRECT). What is not aligned to 4096 bytes in memory or in
            the file goes through an aligned buffer of the thread.

    Raises `error` for what cannot be opened or is no regular file, ConfigError where the file
    system has no O_DIRECT.
    """

    def __init__(
        self,
        path: Path,
        error: type[MoetError] = PackError,
        *,
        follow: bool = False,
        direct: bool = False,
    ) -> None:
        self.path = path
        self._direct = direct
        self._bounce = threading.local()
        # O_NONBLOCK, because opening a FIFO would otherwise wait for its writer.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
        flags |= (0 if follow else os.O_NOFOLLOW) | (os.O_DIRECT if direct else 0)
        try:
            self._fd = os.open(path, flags)
        except OSError as cause:
            if direct and cause.errno == errno.EINVAL:
                raise ConfigError(
                    f"{path}: this file system does not support direct I/O.", "Turn it off."
                ) from None
            if cause.errno == errno.ELOOP:
                raise error(
                    f"{path}: is a symbolic link.", "Copy the pack with its links followed: cp -rL."
                ) from None
            what = (
                "is missing"
                if cause.errno == errno.ENOENT
                else f"cannot be read ({cause.strerror})"
            )
            raise error(f"{path}: {what}.", REMAKE) from None
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise error(f"{path}: is not a regular file.", REMAKE)
        self.size = status.st_size

    def read(self, buffers: Sequence[U8], offset: int) -> int:
        """Fills `buffers` one after the other with the bytes from `offset` on.

        Returns the bytes read from storage. Raises OSError, EOFError where the file ends early;
        the caller knows what was wanted there.
        """
        if not self._direct:
            return _read_exact(self._fd, [item.data for item in buffers], offset)
        length = sum(item.nbytes for item in buffers)
        if not length:
            return 0
        if len(buffers) == 1 and _aligned(offset, length, buffers[0].ctypes.data):
            return _read_exact(self._fd, [buffers[0].data], offset)
        start = offset - offset % ROW_ALIGN
        stop = -(-(offset + length) // ROW_ALIGN) * ROW_ALIGN
        bounce = self._aligned_buffer(stop - start)
        # The last block may reach past the end of the file.
        have = min(stop, self.size) - start
        _read_exact(self._fd, [bounce[: stop - start]], start, have)
        if start + have < offset + length:
            raise EOFError(ENDS_EARLY)
        position = offset - start
        for item in buffers:
            item.data[:] = bounce[position : position + item.nbytes]
            position += item.nbytes
        return have

    def _aligned_buffer(self, size: int) -> memoryview:
        buffer = getattr(self._bounce, "buffer", None)
        if buffer is None or len(buffer) < size:
            buffer = memoryview(mmap.mmap(-1, size))  # page-aligned
            self._bounce.buffer = buffer
        return buffer

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> StorageFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _aligned(*values: int) -> bool:
    return all(value % ROW_ALIGN == 0 for value in values)


def _read_exact(fd: int, views: list[memoryview], offset: int, needed: int | None = None) -> int:
    """preadv until `needed` bytes (default: all of `views`) are there."""
    total = sum(view.nbytes for view in views)
    needed, done = total if needed is None else needed, 0
    while done < needed:
        got = os.preadv(fd, _rest(views, done), offset + done)
        if got == 0:
            raise EOFError(ENDS_EARLY)
        done += got
    return done


def _rest(views: list[memoryview], done: int) -> list[memoryview]:
    """`views` without their first `done` bytes."""
    if done == 0:
        return views
    rest = []
    for view in views:
        if done < view.nbytes:
            rest.append(view[done:])
        done = max(0, done - view.nbytes)
    return rest


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns an OSError into a PackError that says what stops the writing of `path`."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise PackError(f"{path}: the disk is full.", RESUME) from error
        if error.errno == errno.EFBIG:
            raise PackError(f"{path}: the file is larger than allowed here.", RESUME) from error
        where = error.filename or path
        raise PackError(
            f"{where}: cannot be written ({error.strerror or error}).",
            "Choose a directory that you can write to.",
        ) from error


def write_exact(fd: int, data: U8 | bytes, offset: int) -> None:
    """pwrite until all of `data` is written at `offset`; raises OSError."""
    view = memoryview(data) if isinstance(data, bytes) else data.data
    while view.nbytes:
        done = os.pwrite(fd, view, offset)
        view, offset = view[done:], offset + done


def begin_writeback(fd: int, offset: int, size: int) -> None:
    """Starts to bring written bytes to the disk, so that a later fsync has less to wait for."""
    # Linux starts to write dirty pages here, and drops clean ones only.
    os.posix_fadvise(fd, offset, size, os.POSIX_FADV_DONTNEED)


def write_file(path: Path, data: bytes) -> None:
    """Writes a whole file durably: a temporary name, fsync, rename, fsync of the directory."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Makes the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
