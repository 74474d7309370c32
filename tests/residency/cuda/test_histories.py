"""The GPU's tiers on a stand-in for the GPU: all of the host's side, with real threads.

That wrong rows are noticed is tested here too.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from moet.errors import ConfigError
from moet.residency.cuda import device, memory
from moet.residency.cuda.copies import DeviceCopy
from moet.residency.tiers import Tier

from .history import run_block
from .source import BASE, ROW_BYTES
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
