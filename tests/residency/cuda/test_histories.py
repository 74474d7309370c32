"""The GPU's tiers on a stand-in for the GPU: all of the host's side, with real threads."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from moet.residency.cuda import device, memory

from .history import run_block
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
