"""The compiled kernels of the tiers, and what they keep in GPU memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moet.kernels.cuda.compiler import cached_cubin
from moet.kernels.cuda.launch import Kernel
from moet.kernels.cuda.target import Target
from moet.residency.cuda.ahead import Routes
from moet.residency.cuda.mailbox import Mailbox, mask_words

_THREADS = 256
_FINISH_BLOCKS = 16  # the counts of 43 × 256 experts take one block several µs


def state_words(planes: int, layers: int, experts: int) -> int:
    """64-bit words of `State` of ensure.cu."""
    return 8 + planes * (6 + 2 * layers * experts)


@dataclass(frozen=True)
class Staged:
    """Copies of a layer's rows. slot: int32 [experts], −1: none. rows: uint8 [slots, row_bytes].

    sources, count: what there is to copy, for the copying kernel.
    """

    slot: Tensor
    rows: Tensor
    sources: Tensor
    count: Tensor

    @classmethod
    def empty(cls, experts: int, slots: int, row_bytes: int, device: torch.device) -> Staged:
        return cls(
            torch.full((experts,), -1, dtype=torch.int32, device=device),
            torch.empty(slots, row_bytes, dtype=torch.uint8, device=device),
            torch.empty(max(1, slots), 2, dtype=torch.int64, device=device),
            torch.zeros(1, dtype=torch.int32, device=device),
        )


class TierKernels:
    """Launches; nothing is allocated after construction.

    Args:
        code: uint8 [layers, experts]. planes: bytes of a row, by precision code in use, ascending.

    Attributes:
        code: the same on the device. use: int64 [planes, layers, experts], State::use.
    """

    def __init__(
        self,
        code: NDArray[np.uint8],
        planes: Mapping[int, int],
        mailbox: Mailbox,
        device: torch.device,
    ) -> None:
        layers, experts = code.shape
        self._device = device
        self.dummy = torch.zeros(max(planes.values()), dtype=torch.uint8, device=device)
        self._nothing = Staged.empty(experts, 0, 0, device)
        with torch.cuda.device(device):
            properties: Any = torch.cuda.get_device_properties(device)
            self._architecture = Target.of(properties.major, properties.minor).architecture
            self._defines = defines = {
                "LAYERS": layers, "EXPERTS": experts, "MASK_WORDS": mask_words(experts),
                "PLANES": sum(1 << code for code in planes),
            }  # fmt: skip
            cubin = cached_cubin("ensure.cu", self._architecture, defines)
            self._ensure, self._finish = Kernel(cubin, "ensure"), Kernel(cubin, "finish")
            sizes = [*planes.values(), 0, 0]
            sized = defines | {f"ROW_BYTES_{i}": sizes[i] for i in range(3)}
            cubin = cached_cubin("stage.cu", self._architecture, sized)
            self._plan, self._copy = Kernel(cubin, "plan_stage"), Kernel(cubin, "copy_stage")
            words = state_words(len(planes), layers, experts)
            self._state = torch.zeros(words, dtype=torch.int64, device=device)
            self.failures = self._state[2:3]  # State::failures
            first, counts = state_words(len(planes), 0, 0), len(planes) * layers * experts
            self.use = self._state[first : first + counts].view(len(planes), layers, experts)
            self.code = torch.from_numpy(code).to(device)
            torch.cuda.current_stream(device).synchronize()
        # Pinned memory has the same address on the device (unified addressing).
        self._mailbox = torch.from_numpy(mailbox.device_side)
        self._table = torch.from_numpy(mailbox.table.view(np.int64))
        self._answer = torch.from_numpy(mailbox.answer.view(np.int64))

    def ensure(
        self,
        ids: Tensor,
        layer: int,
        begin: int,
        decode: bool,
        patience: int,
        code: Tensor,
        address: Tensor,
        precision: Tensor,
        staged: Staged | None = None,
    ) -> None:
        """On the current stream.

        patience: ms without a sign of the host's life after which a request is given up.
        ids: int32, any shape. begin: as in ensure.cu. code: uint8 [layers, experts].
        address: int64 [experts]; precision: uint8 [experts]; written. staged: copies of the layer's
        rows, at the precisions of `code`, to be used instead.
        """
        copies = staged or self._nothing
        self._ensure.launch(
            (1, 1), _THREADS, torch.cuda.current_stream(self._device).cuda_stream,
            [ids, ids.numel(), layer, begin, int(decode), self._table, code,
             self._state, self._mailbox, self._answer, patience, self.dummy, address, precision,
             int(staged is not None), copies.slot, copies.rows, copies.rows.shape[1]],
        )  # fmt: skip

    def stage(self, layer: int, code: Tensor, into: Staged, blocks: int, stream: int) -> None:
        """Copies the layer's rows in host memory, as many as there is room for."""
        slots, row_bytes = into.rows.shape
        self._plan.launch(
            (1, 1), 32, stream,
            [layer, self._table, code, slots, into.slot, into.sources, into.count],
        )  # fmt: skip
        self._copy.launch(
            (blocks, 1), _THREADS, stream, [into.sources, into.count, into.rows, row_bytes]
        )

    def foresee(self, routes: Routes, hints: NDArray[np.uint8]) -> None:
        """Prepares `ahead`. hints: pinned, `Hints` of ahead.cu."""
        vocabulary, top_k = routes.tables[0].shape
        of = {"AHEAD": len(routes.layers), "VOCABULARY": vocabulary, "TOP_K": top_k}
        with torch.cuda.device(self._device):
            cubin = cached_cubin("ahead.cu", self._architecture, self._defines | of)
            self._ahead = Kernel(cubin, "ahead")
            addresses = [table.data_ptr() for table in routes.tables]
            self._routes = torch.tensor(addresses, dtype=torch.int64, device=self._device)
            self._ahead_layers = torch.tensor(routes.layers, dtype=torch.int32, device=self._device)
            self._posting = torch.zeros(2, dtype=torch.int64, device=self._device)
        self._tables = routes.tables  # which the kernel reads
        self._hints = torch.from_numpy(hints)

    def ahead(self, token_ids: Tensor, code: Tensor) -> None:
        """On the current stream. token_ids: int32 or int64, contiguous."""
        wide = [of.dtype == torch.int64 for of in (token_ids, self._tables[0])]
        self._ahead.launch(
            (len(self._tables), 1), _THREADS,
            torch.cuda.current_stream(self._device).cuda_stream,
            [token_ids, token_ids.numel(), self._routes, wide[0] + 2 * wide[1],
             self._ahead_layers, self._table, code, self._posting, self._hints],
        )  # fmt: skip

    def finish(self) -> None:
        """On the current stream."""
        self._finish.launch(
            (_FINISH_BLOCKS, 1), _THREADS,
            torch.cuda.current_stream(self._device).cuda_stream, [self._state, self._mailbox],
        )  # fmt: skip
