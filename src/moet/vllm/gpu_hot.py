"""The adaptive hot set between the steps of a GPU."""

from __future__ import annotations

import torch

from moet.residency.cuda import CudaTierDevice
from moet.residency.tiers.hot import TierHotSet
from moet.vllm.gpu_tables import ExpertTable


class HotSteps:
    """Counts steps, and changes the table that they read every so many of them.

    What a decision is made from must not depend on how far the device is: the counts are copied on
    the steps' stream, one step ahead, so that nobody waits for the step that runs.

    Args:
        every: steps between two decisions. own, fp4: tables of all experts. now: the one in use.
    """

    def __init__(
        self,
        hot: TierHotSet,
        every: int,
        device: CudaTierDevice,
        own: ExpertTable,
        fp4: ExpertTable,
        now: ExpertTable,
    ) -> None:
        self.hot = hot
        self._every, self._device = every, device
        self._own, self._fp4, self._now = own, fp4, now
        self._step = 0
        code = device.code
        self._counts = torch.zeros(code.shape, dtype=torch.int64, pin_memory=code.is_cuda)
        self._drained = torch.zeros(code.shape, dtype=torch.int64)
        self._copied: torch.cuda.Event | None = None

    def begin_step(self) -> None:
        """Before a step is launched, on its stream."""
        if self._step == 0:  # vLLM's warm-up steps are not counted
            self._device.copy_use(self._counts).synchronize()
            self._drained.copy_(self._counts)
        if self._step % self._every == 0 and self._copied is not None:
            self._decide(self._copied)
        if (self._step + 1) % self._every == 0:
            self._copied = self._device.copy_use(self._counts)
        self._step += 1

    def _decide(self, copied: torch.cuda.Event) -> None:
        copied.synchronize()
        before = self.hot.members.copy()
        self.hot.decide((self._counts - self._drained).numpy(), self._step)
        self._drained.copy_(self._counts)
        if (before != self.hot.members).any():
            self._now.mix(self._own, self._fp4, self.hot.members)
