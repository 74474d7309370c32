"""Whether an encoder makes the quantizer's rows, found out beside the packing."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moet.checkpoints.base import ExpertSource
from moet.checkpoints.reader import Checkpoint
from moet.closing import Closing
from moet.errors import PackError
from moet.pack.encode import EncodedRows, RowEncoder, encode_rows
from moet.pack.layer import LayerLayout
from moet.quantize.base import BaseQuantizer


class CheckedEncoder(Closing):
    """An encoder, of whose experts the first of each kind is compared with the quantizer's rows:
    drivers, compilers and other GPUs than ours may have errors that no test of ours has met.

    A kind is a form in the checkpoint and a layout of rows. The quantizer takes seconds for an
    expert, so it runs in a thread of its own while packing goes on; `check` waits for it. A context
    manager; any number of threads may encode.
    """

    def __init__(
        self, encoder: RowEncoder, checkpoint: Checkpoint, quantizer: BaseQuantizer
    ) -> None:
        self._encoder, self._checkpoint, self._quantizer = encoder, checkpoint, quantizer
        self._pool = ThreadPoolExecutor(1, "moet-check")
        self._choosing = threading.Lock()
        self._checks: dict[Hashable, Future[None]] = {}

    def encode(self, source: ExpertSource, layout: LayerLayout, expert: int) -> EncodedRows | None:
        """None for an expert that the quantizer should encode."""
        rows = self._encoder.encode(source, layout)
        if rows is not None:
            kind = source.gate.format, layout.base, layout.fp4, layout.fp4_in_pack
            with self._choosing:
                if kind not in self._checks:
                    kept = replace(
                        rows,
                        base=rows.base.copy(),
                        fp4=None if rows.fp4 is None else rows.fp4.copy(),
                    )
                    self._checks[kind] = self._pool.submit(
                        self._compare, kept, source, layout, expert
                    )
        return rows

    def check(self) -> None:
        """Waits for the comparisons with what was encoded so far; raises PackError where rows
        differ."""
        with self._choosing:
            checks = list(self._checks.values())
        for check in checks:
            check.result()

    def close(self) -> None:
        """Waits for a comparison that has begun, and drops the others."""
        self._pool.shutdown(cancel_futures=True)

    def _compare(
        self, found: EncodedRows, source: ExpertSource, layout: LayerLayout, expert: int
    ) -> None:
        expected = encode_rows(self._checkpoint, self._quantizer, layout, expert, source)
        pairs: dict[str, tuple[NDArray[Any] | None, NDArray[Any] | None]] = {
            "base row": (found.base, expected.base),
            "base factors": (found.base_factor, expected.base_factor),
            "FP4 row": (found.fp4, expected.fp4),
            "FP4 factors": (found.fp4_factor, expected.fp4_factor),
        }
        nothing = np.empty(0)
        wrong = [
            name
            for name, (one, other) in pairs.items()
            if not np.array_equal(
                nothing if one is None else one, nothing if other is None else other
            )
        ]
        if found.statistics != expected.statistics:
            wrong.append("statistics")
        if wrong:
            raise PackError(
                f"layer {layout.layer}, expert {expert}: the GPU's {' and '.join(wrong)} differ "
                "from the CPU's.",
                "Pack with --device cpu, and report this.",
            )
