"""A row source in memory and a device that reads late: the world around a residency manager."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from random import Random

import numpy as np
from numpy.typing import NDArray

from moet.errors import PackError
from moet.formats.layout import Precision, RowLayout
from moet.pack.source import RowKey, RowSource
from moet.residency.backend import U8, HostBackend
from moet.residency.lease import Wave
from moet.residency.manager import ResidencyManager

BASE, FP4 = Precision.BASE, Precision.MXFP4
LAYOUTS = {p: RowLayout(p, 64, 64, 1) for p in (BASE, FP4)}  # rows of 4096 and 8192 bytes
ROW_BYTES = {p: layout.row_bytes for p, layout in LAYOUTS.items()}
GARBAGE = np.uint64(0xDEAD_BEEF_DEAD_BEEF)


def code(key: RowKey) -> int:
    """Every 8 bytes of the row."""
    return (
        (key.layer << 32 | key.expert << 8 | (key.precision == FP4)) * 0x9E37_79B9_7F4A_7C15 % 2**64
    )


@cache
def content(key: RowKey) -> bytes:
    return code(key).to_bytes(8, "little") * (ROW_BYTES[key.precision] // 8)


def check_row(address: int, key: RowKey) -> None:
    """What a kernel would read at `address` is the row, all of it."""
    assert address, f"{key} has no address"
    found = ctypes.string_at(address, ROW_BYTES[key.precision])
    assert found == content(key), f"{key} reads {set(np.frombuffer(found, np.uint64))}"


class SimSource(RowSource):
    """Rows whose bytes name them; while one is being read, its memory holds garbage.

    broken: keys that fail, halfway. delay: called once a read, in seconds; None: no waiting.
    """

    def __init__(
        self,
        layers: Sequence[int] = (1, 2, 5),
        num_experts: int = 8,
        delay: Callable[[], float] | None = None,
    ) -> None:
        self.layers = tuple(layers)
        self.num_experts = num_experts
        self.layouts = LAYOUTS
        self.identity = "sim"
        self.broken: set[RowKey] = set()
        self.reads: list[RowKey] = []
        self.raised: list[PackError] = []
        self.delay = delay
        self._writing: set[int] = set()
        self._lock = threading.Lock()

    def read(self, key: RowKey, out: U8) -> int:
        words, place = out.view(np.uint64), out.ctypes.data
        with self._lock:
            assert place not in self._writing, "two reads into one slot"
            self._writing.add(place)
            self.reads.append(key)
        try:
            words[:] = GARBAGE
            if self.delay is not None:
                time.sleep(self.delay())
            if key in self.broken:
                error = PackError(f"layer {key.layer}, expert {key.expert}: checksum mismatch.")
                self.raised.append(error)
                raise error
            words[:] = code(key)
        finally:
            with self._lock:
                self._writing.remove(place)
        return out.size

    def factors(self, layer: int, precision: Precision) -> NDArray[np.float32]:
        return np.ones((self.num_experts, 3), np.float32)


class LateDevice(HostBackend):
    """A device whose kernels read their rows at any time until their epoch is completed.

    `reads` tells it what an epoch reads; the rows are checked when it is completed, at a time that
    `lag` decides: epochs that may still be open after a call of `completed`.
    """

    def __init__(self, lag: Callable[[], int] = lambda: 0) -> None:
        super().__init__()
        self._lag = lag
        self._done = 0
        self._readers: dict[int, list[tuple[int, RowKey]]] = {}
        self._lock = threading.Lock()

    def reads(self, epoch: int, rows: list[tuple[int, RowKey]]) -> None:
        self._readers[epoch] = rows

    def write(self, pool: Precision, slot: int, read: Callable[[U8], int]) -> int:
        address = self.address(pool, slot)
        with self._lock:
            taken = [key for rows in self._readers.values() for a, key in rows if a == address]
        assert not taken, f"slot {slot} is written while {taken} are read"
        return super().write(pool, slot, read)

    def completed(self) -> int:
        self._complete(max(self._done, self._ended - self._lag()))
        return self._done

    def wait(self, epoch: int) -> None:
        super().wait(epoch)
        self._complete(epoch)

    def _complete(self, epoch: int) -> None:
        for number in range(self._done + 1, epoch + 1):
            with self._lock:
                for address, key in self._readers.pop(number, []):
                    check_row(address, key)
        self._done = max(self._done, epoch)


def random_device(seed: int) -> LateDevice:
    rng = Random(seed)
    return LateDevice(lambda: rng.choice((0, 0, 1, 2, 5)))


def uniform(source: SimSource, precision: Precision = BASE) -> dict[int, list[Precision]]:
    return {layer: [precision] * source.num_experts for layer in source.layers}


def run_lease(
    manager: ResidencyManager,
    layer: int,
    decode: Iterable[int],
    scan: Iterable[int] = (),
    during: Callable[[Wave], None] = lambda wave: None,
) -> list[Wave]:
    """One layer's turn as the MoE method takes it, with every promise of a lease checked."""
    decode, scan = list(decode), list(scan)
    device, waves, seen = manager._backend, [], []
    index = manager.layers.index(layer)
    tables = {
        p: manager.address_table(p)[index] for p in {pool.precision for pool in manager._pools}
    }
    with manager.lease(layer, decode=decode, scan=scan) as lease:
        for wave in lease:
            waves.append(wave)
            keys = [
                RowKey(layer, int(e), p) for e, p in zip(wave.experts, wave.precision, strict=True)
            ]
            rows = list(zip(wave.address.tolist(), keys, strict=True))
            assert rows, "an empty wave"
            for address, key in rows:
                assert address == tables[key.precision][key.expert]
                check_row(address, key)
            if isinstance(device, LateDevice):
                device.reads(wave.epoch, rows)
            seen += wave.experts.tolist()
            during(wave)
            for address, key in rows:
                check_row(address, key)
    assert seen == sorted(set(decode) | set(scan)), "each expert once, ascending"
    return waves


def check_pools(manager: ResidencyManager) -> None:
    """Between leases: no slot is lost, no row is in two slots, tables and slots agree."""
    for pool in manager._pools:
        resident = np.flatnonzero(pool._slot_of >= 0)
        slots = pool._slot_of[resident]
        assert len(set(slots.tolist())) == len(slots)
        assert (pool._row_in[slots] == resident).all()
        assert (pool._row_in >= 0).sum() == len(resident) + manager._prefetch.held(pool)
        table = manager.address_table(pool.precision).reshape(-1)
        assert (np.flatnonzero(table) == resident).all()
        kept = np.flatnonzero(pool.kept)
        assert (pool._slot_of[kept] >= 0).all(), "a kept row is not resident"
        assert len(kept) <= pool.slots - pool.streaming
        idle = set(pool._idle)
        assert idle.isdisjoint(pool._slot_of[kept].tolist())
        held = manager._prefetch.held(pool)
        assert len(idle) + len(kept) + held == pool.slots, "a slot is lost"
        assert held <= max(0, pool.streaming - 1)
        empty = (pool._row_in[list(pool._idle)] < 0).tolist()
        assert empty == sorted(empty, reverse=True), "empty slots are not first"
        numbers = pool.metrics()
        assert numbers.used + numbers.free == numbers.slots == len(pool._row_in)
        assert numbers.used == len(resident) + held


def kept_rows(manager: ResidencyManager) -> set[RowKey]:
    return {
        manager._key(row, pool.precision)
        for pool in manager._pools
        for row in np.flatnonzero(pool.kept).tolist()
    }


def coming_rows(manager: ResidencyManager) -> set[RowKey]:
    """Those that are read ahead, once their reads have ended."""
    found = set()
    for pool, reads in zip(manager._pools, manager._prefetch._reads, strict=True):
        for row, (_, (_, read)) in reads.items():
            read.exception()
            found.add(manager._key(row, pool.precision))
    return found


def resident_rows(manager: ResidencyManager) -> set[RowKey]:
    return {
        manager._key(row, pool.precision)
        for pool in manager._pools
        for row in np.flatnonzero(manager.address_table(pool.precision)).tolist()
    }
