"""Random rows in place of a pack's: `--load-format dummy`, to measure speed without a model.

The experts' output is noise of moderate size. What reads, moves and computes rows does all its
work; checksums there are none.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moet.checkpoints.base import Geometry
from moet.errors import ConfigError, PackError
from moet.formats.layout import Precision, RowLayout, max_slices
from moet.pack.files import U8, StorageFile
from moet.pack.source import RowKey, RowSource

_BANK = 16  # different rows of a precision
# Scales of about 0.5 (E4M3; E8M0 for MXFP4), and factors that bring weights near 0.01.
_SCALE = {Precision.BASE: 0x30, Precision.NVFP4: 0x30, Precision.MXFP4: 0x7E}
_FACTOR = 0.01


class DummyRowSource(RowSource):
    """Rows of a geometry. Each is one of a few random ones, chosen by its layer and expert.

    Args:
        file: where rows are read from instead: any bytes (`write_rows` makes them), used as one
            circle, each row at an aligned place of its own. So a disk can be measured with a file
            smaller than the model. direct: read with O_DIRECT.

    Raises ConfigError for a file that holds no row.
    """

    def __init__(
        self, geometry: Geometry, tp_size: int = 1, file: Path | None = None, direct: bool = False
    ) -> None:
        self.layers, self.num_experts = geometry.moe_layers, geometry.num_experts
        self.identity = f"dummy {geometry.hidden} {geometry.intermediate}"
        slices = max_slices(geometry.intermediate)
        self.layouts = {
            p: RowLayout(p, geometry.hidden, geometry.intermediate, slices).local(tp_size)
            for p in _SCALE
        }
        self._bank: dict[Precision, list[U8]] = {}
        self._file = None if file is None else StorageFile(file, direct=direct)
        if self._file is not None and self._file.size < self.layouts[Precision.BASE].row_bytes:
            raise ConfigError(
                f"{file}: {self._file.size} bytes are no row, which has "
                f"{self.layouts[Precision.BASE].row_bytes}.",
                "Name a larger file, or leave the setting pack out: rows then come from memory.",
            )

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def read(self, key: RowKey, out: NDArray[np.uint8]) -> int:
        size = self.layouts[key.precision].row_bytes
        number = key.layer * self.num_experts + key.expert
        if self._file is None:
            out[:size] = self._rows(key.precision)[number % _BANK]
            return 0
        places = max(1, self._file.size // size)  # too small for an FP4 row: it ends early
        try:
            return self._file.read([out[:size]], number % places * size)
        except (OSError, EOFError) as error:
            raise PackError(f"dummy rows: layer {key.layer} expert {key.expert}: {error}") from None

    def factors(self, layer: int, precision: Precision) -> NDArray[np.float32]:
        return np.full((self.num_experts, 3), _FACTOR, np.float32)

    def write_rows(self, path: Path, precision: Precision, count: int) -> None:
        """Writes a file of `count` random rows of a precision."""
        with path.open("wb") as file:
            for number in range(count):
                file.write(self._rows(precision)[number % _BANK].data)

    def _rows(self, precision: Precision) -> list[U8]:
        if precision not in self._bank:
            self._bank[precision] = [_row(self.layouts[precision], seed) for seed in range(_BANK)]
        return self._bank[precision]


def _row(layout: RowLayout, seed: int) -> U8:
    rng = np.random.default_rng(seed)
    row: U8 = rng.integers(0, 256, layout.row_bytes, np.uint8)
    slices = row[: layout.payload_bytes].reshape(layout.slices, layout.slice_bytes)
    for begin, end in (
        (layout.gate_up_scales, layout.down_codes),
        (layout.down_scales, layout.slice_bytes),
    ):
        slices[:, begin:end] = _SCALE[layout.precision] + slices[:, begin:end] % 4
    return row
