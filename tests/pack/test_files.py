"""Reads at any offset, through the page cache or past it; only regular files."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moet.errors import CheckpointError, PackError
from moet.pack.files import StorageFile

SIZE = 50_001  # no multiple of a block
CONTENT = np.random.default_rng(0).integers(0, 256, SIZE, np.uint8)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("files") / "file"
    path.write_bytes(CONTENT.tobytes())
    return path


@settings(max_examples=60, deadline=None)
@given(
    offset=st.integers(0, SIZE - 1) | st.integers(0, SIZE // 4096).map(lambda block: block * 4096),
    lengths=st.lists(st.integers(0, 9000) | st.just(4096), min_size=1, max_size=4),
    shift=st.sampled_from([0, 1]),
)
@example(offset=0, lengths=[0, 0], shift=0)
def test_reads_are_exact(
    path: Path, direct_io: bool, offset: int, lengths: list[int], shift: int
) -> None:
    memory = np.frombuffer(mmap.mmap(-1, 65536), np.uint8)  # page-aligned; `shift` misaligns it
    buffers, begin = [], shift
    for length in lengths:
        buffers.append(memory[begin : begin + length])
        begin += length
    with StorageFile(path, direct=direct_io) as file:
        if offset + sum(lengths) > SIZE:
            with pytest.raises(EOFError):
                file.read(buffers, offset)
            return
        done = file.read(buffers, offset)
    assert done >= sum(lengths) if direct_io else done == sum(lengths)
    assert np.array_equal(np.concatenate(buffers), CONTENT[offset : offset + sum(lengths)])
    assert not memory[begin:].any()
    assert not memory[:shift].any()


def test_what_is_no_regular_file_is_refused(path: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")  # opening it must not wait for a writer
    (tmp_path / "link").symlink_to(path)
    for name in ("fifo", ".", "link", "missing"):
        with pytest.raises(PackError, match=str(tmp_path / name)):
            StorageFile(tmp_path / name)
    with StorageFile(tmp_path / "link", CheckpointError, follow=True) as file:
        assert file.size == SIZE
    with pytest.raises(CheckpointError, match="missing"):
        StorageFile(tmp_path / "missing", CheckpointError, follow=True)
