"""An owner that stands still while a step waits for rows: the step fails, and nothing is read that
the owner may replace when it goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch

from moet.kernels.cuda.shape import PRECISION_CODES
from moet.residency.cuda import CudaTierDevice
from moet.residency.tiers import TieredResidency, TierOptions, TierSizes

from .source import BASE, ROW_BYTES, RandomRows


def run_stall(steps: Callable[..., Any]) -> None:
    """steps: `StandInSteps`, or the same on a GPU."""
    source = RandomRows(1, 8, [BASE], seed=1)
    code = np.full((1, 8), PRECISION_CODES[BASE], np.uint8)
    on: torch.device = steps.torch_device  # type: ignore[attr-defined]
    device = CudaTierDevice(code, {BASE: ROW_BYTES[BASE]}, 2, on, decode_tokens=4, patience=0.1)
    options = TierOptions(layer_rows=2, plan_every=1)
    with TieredResidency(
        source, source.layers, {BASE: code == 0}, {BASE: TierSizes(2, 3)}, device, options
    ) as manager:
        manager.start()
        made = steps(device, source, code)

        def step(*experts: int) -> int:
            """How many of the rows were the zeros of a failed step."""
            before = int(made.zeros)
            ids = torch.tensor([experts], dtype=torch.int32, device=on)
            made.check(0, device.ensure(0, ids), ids, device.code)
            device.finish()
            made.synchronize()
            return int(made.zeros) - before

        assert step(0, 1) == 0
        goes_on = threading.Event()

        def stand_still(future: Future[None]) -> None:
            goes_on.wait()
            future.set_result(None)

        stands = manager._submit(stand_still)
        assert step(0, 2) == 1, "what is in memory may be read until the owner goes on"
        assert (device.failed_steps(), device.failed_step()) == (1, 2)
        assert step(0, 1) == 2, "the owner may replace any row when it goes on"
        assert device.failed_steps() == 2
        goes_on.set()
        stands.result(timeout=10)
        deadline = time.monotonic() + 10
        while device.poll() is not None:
            assert time.monotonic() < deadline
            time.sleep(1e-3)
        for experts in ((0, 1), (2, 3), (4, 5), (0, 2)):
            assert step(*experts) == 0
        assert device.failed_steps() == 2
        assert made.wrong == 0
