"""Rows of random bytes, for histories on a GPU and on its stand-in."""

from __future__ import annotations

import time
from collections.abc import Mapping
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np

from moet.errors import PackError
from moet.formats.layout import Precision
from moet.pack.source import RowKey, RowSource

BASE, FP4 = Precision.BASE, Precision.MXFP4
ROW_BYTES = {BASE: 16 << 10, FP4: 32 << 10}
FIRST_LAYER = 3


class RandomRows(RowSource):
    """rows: by precision, uint8 [layers, experts, row bytes]. Reads take a random, short time; rows
    in `broken` fail halfway. delay: seconds, of every read."""

    def __init__(self, layers: int, experts: int, precisions: list[Precision], seed: int) -> None:
        self.layers = tuple(range(FIRST_LAYER, FIRST_LAYER + layers))
        self.num_experts = experts
        self.layouts: Mapping[Precision, Any] = {
            p: SimpleNamespace(row_bytes=ROW_BYTES[p]) for p in precisions
        }
        self.identity = "random"
        rng = np.random.default_rng(seed)
        self.rows = {
            p: rng.integers(0, 256, (layers, experts, ROW_BYTES[p]), np.uint8) for p in precisions
        }
        self.broken: set[RowKey] = set()
        self.delay = 0.0
        self._pace = Random(seed)

    def read(self, key: RowKey, out: np.ndarray) -> int:
        row = self.rows[key.precision][key.layer - FIRST_LAYER, key.expert]
        half = row.size // 2
        out[:half] = row[:half]
        time.sleep(self.delay + self._pace.choice((0.0, 0.0, 0.0002)))
        if key in self.broken:
            raise PackError(f"layer {key.layer}, expert {key.expert}: checksum mismatch.")
        out[half:] = row[half:]
        return row.size

    def factors(self, layer: int, precision: Precision) -> Any:
        raise AssertionError("nobody asks for factors here")
