"""Memory in chunks, the mailbox, and the wait for a request."""

from __future__ import annotations

import errno
import mmap
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from moet.errors import ConfigError
from moet.formats.layout import Precision
from moet.kernels.cuda.launch import CudaError
from moet.residency.cuda import memory
from moet.residency.cuda.copies import CopyStreams, DeviceCopy
from moet.residency.cuda.driver import Driver
from moet.residency.cuda.mailbox import Mailbox, mailbox_type
from moet.residency.cuda.memory import ArenaPlaces, ChunkedPlaces, GpuPlaces
from moet.residency.metrics import Phase

from .stand_in import StandInDriver

BASE, FP4 = Precision.BASE, Precision.MXFP4
ROW = 4096


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_CHUNK_BYTES", 4 * ROW)


@pytest.fixture
def driver() -> StandInDriver:
    return StandInDriver(torch.device("cpu"))


def places(kind: str, driver: StandInDriver) -> ChunkedPlaces[Any]:
    if kind == "arena":
        return ArenaPlaces(ROW, driver)  # type: ignore[arg-type]
    return GpuPlaces(ROW, driver, driver.stream())  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["gpu", "arena"])
def test_places_keep_their_addresses(kind: str, driver: StandInDriver) -> None:
    tested = places(kind, driver)
    known: list[int] = []
    for count in (3, 4, 10, 21, 13, 14, 2, 0, 9, 30):
        tested.resize(count)
        addresses = [tested.address(slot) for slot in range(count)]
        common = min(count, len(known))
        assert addresses[:common] == known[:common]
        for one, other in zip(sorted(addresses), sorted(addresses)[1:], strict=False):
            assert other - one >= ROW
        known = addresses


@pytest.mark.parametrize("kind", ["gpu", "arena"])
def test_too_little_memory_changes_nothing(kind: str, driver: StandInDriver) -> None:
    tested = places(kind, driver)
    tested.resize(6)
    known = [tested.address(slot) for slot in range(6)]
    driver.pins_left, driver.gpu_left = 2, 0
    with pytest.raises(ConfigError, match="memory"):
        tested.resize(40)
    assert tested.count == 6
    assert [tested.address(slot) for slot in range(6)] == known
    driver.pins_left, driver.gpu_left = 100, 1 << 30
    tested.resize(40)
    assert [tested.address(slot) for slot in range(6)] == known


def test_memory_given_up_is_used_again(driver: StandInDriver) -> None:
    gpu = places("gpu", driver)
    gpu.resize(12)
    gpu.resize(4)
    driver.gpu_left = 0
    gpu.resize(12)
    arena = ArenaPlaces(ROW, driver)  # type: ignore[arg-type]
    arena.resize(12)
    arena.view(11)[:] = 7
    pinned = set(driver.pinned)
    arena.resize(4)
    assert set(driver.pinned) == pinned, "unpinning would wait for the kernels that run"
    driver.pins_left = 0
    arena.resize(12)
    assert set(driver.pinned) == pinned
    arena.resize(4)
    arena.trim()
    assert len(driver.pinned) == 1
    arena.resize(0)
    arena.trim()
    assert not driver.pinned


def test_a_kernel_without_huge_pages_has_an_arena_too(
    driver: StandInDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Mapping(mmap.mmap):
        def madvise(self, *arguments: int) -> None:
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(memory, "_HUGE_PAGE", ROW)
    monkeypatch.setattr(mmap, "mmap", Mapping)
    arena = ArenaPlaces(ROW, driver)  # type: ignore[arg-type]
    arena.resize(3)
    arena.view(2)[:] = 7
    arena.resize(0)
    arena.trim()


def test_an_arena_that_the_system_refuses_is_a_clear_error(
    driver: StandInDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_arguments: int, **_flags: int) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    arena = ArenaPlaces(ROW, driver)  # type: ignore[arg-type]
    arena.resize(3)
    monkeypatch.setattr(mmap, "mmap", refuse)
    message = r"KiB of the arena cannot be allocated: .*Cannot allocate.*Make `arena` smaller"
    with pytest.raises(ConfigError, match=message):
        arena.resize(30)
    assert arena.count == 3


def test_too_little_memory_to_pin_says_what_to_do() -> None:
    driver = Driver.__new__(Driver)  # without a GPU
    with pytest.raises(ConfigError, match=r"could be pinned. Make arena smaller"):
        driver._check(2, "cuMemHostRegister_v2")


def wait_for(copy: DeviceCopy) -> None:
    while not copy.done():
        time.sleep(1e-4)


def test_a_copy_that_cannot_be_started_says_so(driver: StandInDriver) -> None:
    landed = np.zeros(2, np.uint64)
    copies = CopyStreams(driver, landed)  # type: ignore[arg-type]
    source, target = np.arange(8, dtype=np.uint8), np.zeros(8, np.uint8)
    addresses = target.ctypes.data, source.ctypes.data
    first = copies.start(*addresses, 8, to_host=True)
    wait_for(first)
    assert landed.tolist() == [0, 1]
    assert target.tolist() == source.tolist()
    driver.broken_copies = True
    second = copies.start(*addresses, 8, to_host=True)
    with pytest.raises(CudaError, match="copy engine"):
        wait_for(second)
    copies.close()


def mailbox(layers: int = 2, experts: int = 40) -> tuple[Mailbox, np.ndarray]:
    """And what the device would see."""
    memory_of = np.full(Mailbox.bytes_needed(2, layers, experts), 0xEE, np.uint8)
    made = Mailbox({BASE: 0, FP4: 1}, (layers, experts), memory_of)
    return made, made.device_side.view(mailbox_type(2, layers, experts))[0]


def test_a_request_is_told_by_precision() -> None:
    tested, device = mailbox()
    assert tested.poll() is None
    device["missing"][0, :2] = 0b1, 0b1
    device["missing"][1, 0] = 0b1010
    device["present"][0, 0] = 0b100
    device["layer"], device["request"] = 1, 1
    request = tested.poll()
    assert request is not None
    assert (request.number, request.layer) == (1, 1)
    assert request.missing == {BASE: [0, 32], FP4: [1, 3]}
    assert request.present == {BASE: [2], FP4: []}
    tested.reply(1)
    assert tested.poll() is None
    assert int(tested.answer[0]) == 1


def test_entries_and_counts_are_by_plane() -> None:
    tested, device = mailbox()
    places = [tested.entry(BASE, 1, 4), tested.entry(FP4, 1, 4), tested.entry(BASE, 1, 4)]
    tested.publish(places, [2**63 + 1, 5, 4096])
    table = tested.table[: 2 * 2 * 40].reshape(2, 2, 40)
    assert table[0, 1, 4] == 4096
    assert table[1, 1, 4] == 5
    device["use"][1, 0, 7], device["rows"][1, 1, 2], device["steps"] = 3, 9, 2
    counts = tested.counts()
    assert counts.steps == 2
    assert counts.use[FP4][0, 7] == counts.use[FP4].sum() == 3
    assert counts.rows[FP4, Phase.SCAN].tolist() == [0, 0, 9]
    tested.detach()
    device["steps"] = 77
    assert tested.counts().steps == 2


def test_waiting_ends_with_a_request_and_lets_others_run() -> None:
    tested, device = mailbox()
    device["begun"] = 1  # a step runs
    ticks, over = 0, threading.Event()

    def wait() -> None:
        tested.wait(30.0, 0)
        over.set()

    waiting = threading.Thread(target=wait)
    waiting.start()
    end = time.monotonic() + 0.2
    while time.monotonic() < end:
        ticks += 1
    assert ticks > 1000, "the interpreter was held"
    assert not over.is_set()
    device["request"] = 1
    assert over.wait(10)
    waiting.join()
    tested.wait(30.0, 0)  # a request waits already
    begin = time.monotonic()
    tested.wait(0.02, 1)
    assert time.monotonic() - begin >= 0.02
