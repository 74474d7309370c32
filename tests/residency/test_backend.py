"""Host memory as slots; the counters' histogram."""

from __future__ import annotations

import ctypes
from functools import partial

import numpy as np
import pytest

from moet.errors import ConfigError
from moet.formats.layout import Precision
from moet.residency.backend import U8, HostBackend
from moet.residency.metrics import LATENCY_BOUNDS, Counters, LatencyHistogram
from moet.residency.reader import ReadResult


@pytest.mark.parametrize("huge_pages", [False, True])
@pytest.mark.parametrize("prefault", [False, True])
def test_slots_are_aligned_apart_and_zero(huge_pages: bool, prefault: bool) -> None:
    backend = HostBackend(huge_pages, prefault)
    backend.allocate(Precision.BASE, 5, 8192)
    backend.allocate(Precision.MXFP4, 2, 4096)
    places = [(Precision.BASE, s, 8192) for s in range(5)]
    places += [(Precision.MXFP4, s, 4096) for s in range(2)]

    def fill(value: int, size: int, out: U8) -> int:
        assert out.shape == (size,)
        assert not out.any()
        out[:] = value
        return value

    for value, (pool, slot, size) in enumerate(places, 1):
        assert backend.address(pool, slot) % 4096 == 0
        assert backend.write(pool, slot, partial(fill, value, size)) == value
    for value, (pool, slot, size) in enumerate(places, 1):
        assert ctypes.string_at(backend.address(pool, slot), size) == bytes([value]) * size
    backend.close()


def test_too_much_memory_is_a_clear_error() -> None:
    with pytest.raises(ConfigError, match=r"slots of 4096 bytes for base rows"):
        HostBackend().allocate(Precision.BASE, 1 << 50, 4096)


def test_latency_quantiles_are_bucket_bounds() -> None:
    counters = Counters()
    assert LatencyHistogram(tuple(counters.latency_counts), 0.0).p99 == 0.0
    for seconds in [20e-6] * 98 + [3e-3, 100.0]:
        counters.add_read(ReadResult(4096, seconds))
    histogram = LatencyHistogram(tuple(counters.latency_counts), counters.latency_seconds)
    assert histogram.p50 == pytest.approx(32e-6)
    assert histogram.p99 == pytest.approx(4.096e-3)
    assert histogram.quantile(1) == float("inf")
    assert counters.disk_bytes == 4096 * 100
    assert np.isclose(histogram.total_seconds, 98 * 20e-6 + 3e-3 + 100)
    assert len(histogram.counts) == len(LATENCY_BOUNDS) + 1
