"""Random rows: from memory, or from a file that may be too small."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moet.checkpoints.base import Geometry
from moet.errors import ConfigError, PackError
from moet.formats.layout import Precision
from moet.pack import RowKey
from moet.pack.dummy import DummyRowSource

GEOMETRY = Geometry("X", 64, 64, 4, 2, 1, (0,), (), None)


def test_a_file_has_the_rows_that_memory_has(tmp_path: Path) -> None:
    source = DummyRowSource(GEOMETRY)
    source.write_rows(tmp_path / "rows", Precision.BASE, 4)
    size = source.layouts[Precision.BASE].row_bytes
    with DummyRowSource(GEOMETRY, file=tmp_path / "rows") as from_file:
        for expert in range(4):
            rows = [np.zeros(size, np.uint8) for _ in range(2)]
            key = RowKey(0, expert, Precision.BASE)
            assert source.read(key, rows[0]) == 0
            assert from_file.read(key, rows[1]) == size
            assert np.array_equal(*rows)


def test_a_file_that_is_too_small_says_so(tmp_path: Path) -> None:
    source = DummyRowSource(GEOMETRY)
    (tmp_path / "nothing").write_bytes(b"1234")
    with pytest.raises(ConfigError, match=r"4 bytes are no row.*larger file, or leave"):
        DummyRowSource(GEOMETRY, file=tmp_path / "nothing")
    base, fp4 = (source.layouts[p].row_bytes for p in (Precision.BASE, Precision.MXFP4))
    assert base < fp4
    source.write_rows(tmp_path / "one", Precision.BASE, 1)
    with (
        DummyRowSource(GEOMETRY, file=tmp_path / "one") as small,
        pytest.raises(PackError, match="layer 0 expert 3"),
    ):
        small.read(RowKey(0, 3, Precision.MXFP4), np.zeros(fp4, np.uint8))
