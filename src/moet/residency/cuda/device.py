"""Tiers in the memory of an NVIDIA GPU and of its host."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moet.errors import ConfigError
from moet.formats.layout import Precision
from moet.kernels.cuda.shape import PRECISION_CODES
from moet.residency.cuda.ahead import Hints, Routes, hints_type
from moet.residency.cuda.copies import CopyStreams, DeviceCopy
from moet.residency.cuda.driver import Driver
from moet.residency.cuda.kernels import TierKernels
from moet.residency.cuda.mailbox import HOST_ENTRY, Mailbox
from moet.residency.cuda.memory import ArenaPlaces, ChunkedPlaces, GpuPlaces
from moet.residency.cuda.staging import Staging
from moet.residency.tiers.device import (
    U8,
    Counts,
    Entry,
    Place,
    Request,
    Tier,
    TierDevice,
)

PATIENCE_SECONDS = 30.0
_GROWTH_BYTES = 16 << 30  # between two signs of life


@dataclass(frozen=True)
class LayerRows:
    """Where a step finds a layer's rows. Nothing changes it until the layer's next `ensure`.

    address: int64 [experts], 0 for experts that the step does not use. precision: uint8 [experts],
    PRECISION_CODES, + REMOTE where the row lies in host memory.
    """

    address: Tensor
    precision: Tensor


class CudaTierDevice(TierDevice):
    """One rank's GPU. `ensure` and `finish` are called by the thread that launches the model's
    kernels, on its stream, and may be captured in CUDA graphs; the rest as the base class says.

    Args:
        code: uint8 [layers, experts], the precision code that each expert is computed at, unless
            `ensure` is given others.
        precisions: bytes of a row, by precision.
        top_k: experts of a token.
        decode_tokens: passes of at most so many tokens count as decode steps.
        stage_row_bytes, stage_rows: room for so many rows, twice, through which a long prompt's
            layers are streamed; 0 rows: it reads them where they are.
        patience: seconds that a step waits for rows while the owner shows no life; it fails then.

    Attributes:
        code: the same on the device. Steps that are launched after a change see it, graphs that
            were captured before it too.

    Raises ConfigError where memory is short or rows have no multiple of 16 bytes.
    """

    def __init__(
        self,
        code: NDArray[np.uint8],
        precisions: Mapping[Precision, int],
        top_k: int,
        device: torch.device,
        *,
        decode_tokens: int,
        stage_row_bytes: int = 0,
        stage_rows: int = 0,
        patience: float = PATIENCE_SECONDS,
    ) -> None:
        if any(size % 16 for size in precisions.values()):
            raise ConfigError(
                "rows on a GPU need sizes that are multiples of 16 bytes.",
                "Pad them, as `RowLayout.row_bytes` does.",
            )
        known = {PRECISION_CODES[p] for p in precisions}
        if unknown := set(np.unique(code).tolist()) - known:
            raise ConfigError(
                f"experts are computed at precisions {unknown} without rows.",
                "Give `precisions` the row size of each precision that `code` has.",
            )
        self._decode_ids = decode_tokens * top_k
        self._patience = round(patience * 1e3)
        self._row_bytes = dict(precisions)
        self._driver = driver = Driver(device)
        self._host: list[int] = []
        planes = sorted(precisions, key=PRECISION_CODES.__getitem__)
        self._plane = {p: i for i, p in enumerate(planes)}
        memory = self._host_memory(Mailbox.bytes_needed(len(planes), *code.shape))
        self._mailbox = Mailbox(self._plane, code.shape, memory)
        self._hints: Hints | None = None
        kinds = {PRECISION_CODES[p]: precisions[p] for p in planes}
        self._kernels = TierKernels(code, kinds, self._mailbox, device)
        self.code = self._kernels.code
        self._staging: Staging | None = None
        if stage_rows:
            if stage_row_bytes < max(precisions.values()):
                raise ConfigError(
                    f"rows do not fit into staging buffers of {stage_row_bytes} bytes.",
                    "Give `stage_row_bytes` the size of the largest row.",
                )
            self._staging = Staging(
                self._kernels, driver, code.shape, stage_rows, stage_row_bytes, device
            )
        address = torch.zeros(code.shape, dtype=torch.int64, device=device)
        precision = torch.zeros(code.shape, dtype=torch.uint8, device=device)
        self._rows = [LayerRows(*pair) for pair in zip(address, precision, strict=True)]
        self._in_step, self._from_first, self._last = False, False, 0
        self._copies = CopyStreams(driver, self._mailbox.landed)
        self._gpu: dict[Precision, GpuPlaces] = {}
        self._arena: dict[Precision, ArenaPlaces] = {}
        for p, row_bytes in precisions.items():
            self._gpu[p] = GpuPlaces(row_bytes, driver, self._copies.to_gpu)
            self._arena[p] = ArenaPlaces(row_bytes, driver)
        self._closed = False

    # For the thread that launches the model's kernels.

    def ensure(
        self,
        layer: int,
        topk_ids: Tensor,
        *,
        code: Tensor | None = None,
        repeats: bool = False,
        part: int | None = None,
    ) -> LayerRows:
        """In front of a layer's kernels: sees to it that they can read the rows of these experts.

        Waits, on the device, for rows that are on disk only. The first call after `finish`, and any
        of the first layer, begins a pass.

        Args:
            layer: index in the table. topk_ids: int32 [tokens, top-k], contiguous; ids that are no
                expert are skipped.
            code: uint8 [layers, experts], on the device: the precisions wanted, if not those of
                the attribute.
            repeats: a pass that begins here repeats tokens of a step; it is not counted as one.
            part: the layer is looked up more than once in this pass, at different precisions; the
                number of this time, from 0.

        Rows that could not be read are all zeros in a step that has failed: see `failed_steps`.
        """
        assert topk_ids.dtype == torch.int32
        assert topk_ids.is_contiguous()
        rows, code = self._rows[layer], self.code if code is None else code
        begin = 0
        if (layer == 0 and not part) or not self._in_step:
            self._in_step, self._from_first = True, layer == 0
            begin = 2 if layer == 0 and not repeats else 1
        self._last = layer
        ids, staged = topk_ids.numel(), None
        if self._staging is not None:
            staged = self._staging.joined(layer, code)
        self._kernels.ensure(
            topk_ids, layer, begin, ids <= self._decode_ids, self._patience, code, rows.address,
            rows.precision, staged,
        )  # fmt: skip
        # What is copied ahead must not run into the wait of another look at the same layer.
        if self._staging is not None and self._from_first and part is None:
            self._staging.start(layer, code, ids)
        return rows

    def foresee(self, tables: Mapping[int, Tensor]) -> None:
        """Prepares `ahead`, before the first step.

        tables: of the hash-routed layers, by index: int32 or int64 [vocabulary, top-k], on the
        device: the experts of a token's id. Raises UnsupportedError for tables of several forms.
        """
        routes, (_, experts) = Routes.of(tables), self.code.shape
        kind = hints_type(len(routes.layers), len(self._plane), experts)
        hints = Hints(routes.layers, self._plane, experts, self._host_memory(kind.itemsize))
        self._kernels.foresee(routes, hints.memory)
        self._hints = hints

    def ahead(self, token_ids: Tensor, code: Tensor | None = None) -> None:
        """At the start of a pass: has the rows read that its hash-routed layers will find on disk.

        Waits for nothing, and may be captured. token_ids: of the pass, int32 or int64. code: as of
        `ensure`.
        """
        if self._hints is not None:
            self._kernels.ahead(token_ids.contiguous(), self.code if code is None else code)

    def wait_for_rows(self) -> None:
        """Waits until the device has passed the last `ensure`, without holding the interpreter.

        A thread that launches on meanwhile would be stopped by the driver when a thousand kernels
        are queued, or when one is loaded at its first use, and hold the interpreter, which whoever
        is to bring the rows needs.
        """
        passed = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        passed.record()
        passed.synchronize()

    def finish(self) -> None:
        """After the last kernel of a pass that reads rows: the step is done."""
        if self._staging is not None and self._from_first:
            self._staging.finish(self._last)
        self._in_step = self._from_first = False
        self._kernels.finish()

    def failed_steps(self) -> int:
        """How many steps have computed with rows that could not be read; what they computed must
        not be used. `TieredResidency.failure` knows why. Any thread; never waits."""
        return self._mailbox.failures()[0]

    def failed_on_device(self) -> Tensor:
        """The count of `failed_steps` as the stream's work so far leaves it: int64 [1], on the
        device; to be read in stream order."""
        return self._kernels.failures

    def copy_use(self, into: Tensor) -> torch.cuda.Event:
        """Copies how many decode steps have used each expert, at any precision, as the stream's
        work so far leaves it.

        into: int64 [layers, experts], pinned; complete when the event has happened.
        """
        into.copy_(self._kernels.use.sum(0), non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    def failed_step(self) -> int:
        """The newest step that has failed; 0: none has."""
        return self._mailbox.failures()[1]

    def trim(self) -> None:
        """Gives memory that smaller tiers do not need back to the system. Waits for the device:
        only for the thread that launches the model's kernels, between steps."""
        self._driver.synchronize()
        for places in self._all_places():
            places.trim()

    # For the owner.

    def resize(self, precision: Precision, tier: Tier, places: int, row_bytes: int) -> None:
        """See the base class. Chunks of memory that are given up are kept until `trim`.

        Pinning goes at a few GB/s, and a step may be waiting: there are signs of life in between.
        """
        assert row_bytes == self._row_bytes[precision]
        of = self._places(precision, tier)
        before = of.count
        step = max(1, _GROWTH_BYTES // row_bytes if tier == Tier.ARENA else places)
        try:
            for count in [*range(before + step, places, step), places]:
                of.resize(count)
                self.live()
        except ConfigError:
            of.resize(before)
            raise

    def view(self, place: Place) -> U8:
        return self._arena[place.precision].view(place.slot)

    def start_copy(self, source: Place, target: Place) -> DeviceCopy:
        size = self._row_bytes[source.precision]
        to_host = target.tier == Tier.ARENA
        return self._copies.start(self._address(target), self._address(source), size, to_host)

    def publish(self, entries: Sequence[Entry]) -> None:
        places = [self._mailbox.entry(e.precision, e.layer, e.expert) for e in entries]
        self._mailbox.publish(places, [self._value(e.place) for e in entries])

    def begun(self) -> int:
        return self._mailbox.begun()

    def done(self) -> int:
        return self._mailbox.done()

    def poll(self) -> Request | None:
        return self._mailbox.poll()

    def poll_ahead(self) -> dict[Precision, list[int]] | None:
        return None if self._hints is None else self._hints.poll()

    def answer(self, number: int, ok: bool) -> None:
        """See the base class. The step finds out by itself: it looks at the entries again, and
        fails if one is still 0."""
        self._mailbox.reply(number)

    def live(self) -> None:
        self._mailbox.live()

    def counts(self) -> Counts:
        return self._mailbox.counts()

    def wait(self, seconds: float, seen: int) -> None:
        hints = self._hints
        self._mailbox.wait(seconds, seen, *(() if hints is None else (hints.number, hints.seen)))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._driver.synchronize()
        if self._staging is not None:
            self._staging.close()
        self._copies.close()
        for places in self._all_places():
            places.resize(0)
            places.trim()
        self._mailbox.detach()
        self._hints = None
        for address in self._host:
            self._driver.free_host_memory(address)

    def _host_memory(self, size: int) -> U8:
        """Pinned, until `close`."""
        self._host.append(self._driver.host_memory(size))
        return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(self._host[-1]))

    def _all_places(self) -> list[ChunkedPlaces[Any]]:
        return [*self._gpu.values(), *self._arena.values()]

    def _places(self, precision: Precision, tier: Tier) -> GpuPlaces | ArenaPlaces:
        return self._gpu[precision] if tier == Tier.GPU else self._arena[precision]

    def _address(self, place: Place) -> int:
        return self._places(place.precision, place.tier).address(place.slot)

    def _value(self, place: Place | None) -> int:
        """An entry of the table."""
        if place is None:
            return 0
        return self._address(place) + (HOST_ENTRY if place.tier == Tier.ARENA else 0)
