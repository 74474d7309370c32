"""The GPU's tiers on a stand-in for the GPU: all of the host's side, with real threads.

That wrong rows are noticed is tested here too.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from moet.errors import ConfigError, PackError
from moet.pack.source import RowKey
from moet.residency.cuda import device, memory
from moet.residency.cuda.copies import DeviceCopy
from moet.residency.tiers import Tier, TieredResidency, TierOptions, TierSizes

from .history import run_block
from .source import BASE, FIRST_LAYER, ROW_BYTES, RandomRows
from .stalls import run_stall
from .stand_in import StandInDriver, StandInKernels, StandInSteps


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(device, "Driver", StandInDriver)
    monkeypatch.setattr(device, "TierKernels", StandInKernels)
    monkeypatch.setattr(memory, "_CHUNK_BYTES", 64 << 10)  # so that there are several
    logging.disable(logging.CRITICAL)  # failed steps are meant to fail
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("block", range(4))
def test_histories(block: int) -> None:
    run_block(range(10 * block, 10 * (block + 1)), StandInSteps)


def test_a_step_is_not_kept_waiting_for_ever() -> None:
    run_stall(StandInSteps)


def test_a_tier_grows_with_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    row = ROW_BYTES[BASE]
    monkeypatch.setattr(device, "_GROWTH_BYTES", 4 * row)
    made = device.CudaTierDevice(
        np.zeros((1, 8), np.uint8), {BASE: row}, 2, torch.device("cpu"), decode_tokens=4
    )
    life, arena = made._mailbox.answer[1:], made._arena[BASE]
    before = int(life[0])
    made.resize(BASE, Tier.ARENA, 20, row)
    assert (arena.count, int(life[0])) == (20, before + 5)
    addresses = [arena.address(place) for place in range(20)]
    made._driver.pins_left = 2
    with pytest.raises(ConfigError, match="pinned"):
        made.resize(BASE, Tier.ARENA, 60, row)
    assert arena.count == 20
    assert [arena.address(place) for place in range(20)] == addresses
    made.resize(BASE, Tier.ARENA, 3, row)
    assert arena.count == 3
    made.close()


@pytest.mark.parametrize(
    ("code", "row_bytes", "options", "message"),
    [
        (0, 4104, {}, "multiples of 16 bytes. Pad them"),
        (1, 4096, {}, r"precisions \{1\} without rows. Give `precisions`"),
        (0, 4096, {"stage_rows": 2, "stage_row_bytes": 16}, "of 16 bytes. Give `stage_row_bytes`"),
    ],
)
def test_what_a_device_cannot_hold_says_what_to_give(
    code: int, row_bytes: int, options: dict[str, int], message: str
) -> None:
    codes = np.full((1, 8), code, np.uint8)
    with pytest.raises(ConfigError, match=message):
        device.CudaTierDevice(
            codes, {BASE: row_bytes}, 2, torch.device("cpu"), decode_tokens=4, **options
        )


class Hasty(StandInKernels):
    """A step that goes on with its copy of the table after it has asked for rows."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, False if name == "stale" else value)


def test_an_outdated_table_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "TierKernels", Hasty)
    with pytest.raises(AssertionError, match="rows were wrong"):
        run_block(range(60), StandInSteps)


def test_a_copy_that_ends_too_early_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceCopy, "done", lambda self: True)
    with pytest.raises(AssertionError, match="rows were wrong"):
        run_block(range(60), StandInSteps)


def test_the_owner_calls_the_driver_to_grow_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may hold the driver until the step has ended that the owner is to serve."""
    calls: set[tuple[str, str]] = set()

    def watched(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            calls.add((threading.current_thread().name, name))
            return call(*args, **kwargs)

        return run

    for name, call in vars(StandInDriver).items():
        if callable(call) and not name.startswith("_"):
            monkeypatch.setattr(StandInDriver, name, watched(name, call))
    run_block(range(20), StandInSteps)
    assert ("moet-copy", "start_copies") in calls
    assert {name for thread, name in calls if thread == "moet-residency"} <= {"gpu_memory"}


class Late(RandomRows):
    """No row comes before `begun` has so many keys."""

    begun: ClassVar[list[RowKey]]
    wanted = 0

    def read(self, key: RowKey, out: np.ndarray) -> int:
        self.begun.append(key)
        end = time.monotonic() + 30
        while len(self.begun) < self.wanted:
            assert time.monotonic() < end, "reads are not begun side by side"
            time.sleep(1e-4)
        return super().read(key, out)


def test_rows_are_read_before_a_layer_asks() -> None:
    """Those of both hash-routed layers, side by side. One that cannot be read fails the steps that
    use it, and no other."""
    source, code = Late(2, 8, [BASE], seed=1), np.zeros((2, 8), np.uint8)
    source.begun = []
    made = device.CudaTierDevice(
        code, {BASE: ROW_BYTES[BASE]}, 2, torch.device("cpu"), decode_tokens=4
    )
    table = torch.tensor([[0, 1], [2, 3], [4, 4]], dtype=torch.int32)
    made.foresee({0: table, 1: table + 1})
    steps = StandInSteps(made, source, code)
    options = TierOptions(layer_rows=2, io_threads=8)
    with TieredResidency(
        source, source.layers, {BASE: code == 0}, {BASE: TierSizes(2, 20)}, made, options
    ) as manager:
        manager.start()

        def step(token: int, reads: int) -> None:
            source.wanted = len(source.begun) + reads
            made.ahead(torch.tensor([token, -1, 3]))
            while len(source.begun) < source.wanted or manager._owner.in_flight:
                time.sleep(1e-4)
            for layer in (0, 1):
                ids = table[[token]] + layer
                steps.check(layer, made.ensure(layer, ids), ids, made.code)
            made.finish()
            steps.synchronize()

        step(0, 4)
        keys = [(0, 0), (0, 1), (1, 1), (1, 2)]
        assert sorted(source.begun) == [RowKey(FIRST_LAYER + i, e, BASE) for i, e in keys]
        now = manager.metrics()
        assert (now.requests, now.prefetched_rows, now.disk_reads) == (0, 4, 4)
        source.broken = {RowKey(FIRST_LAYER + 1, 4, BASE)}
        step(1, 4)
        assert made.failed_steps() == 1
        assert isinstance(manager.failure(made.failed_step()), PackError)
        step(0, 0)
        step(2, 2)
        now = manager.metrics()
        assert made.failed_steps() == now.requests == now.failed_requests == 1
        assert steps.wrong == 0
