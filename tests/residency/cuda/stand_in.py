"""A GPU made of threads: what `CudaTierDevice` calls, on ordinary memory."""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from random import Random

import numpy as np
import torch
from torch import Tensor

from moet.errors import ConfigError
from moet.kernels.cuda.launch import CudaError
from moet.kernels.cuda.shape import REMOTE
from moet.residency.cuda.ahead import Routes, hints_type
from moet.residency.cuda.device import CudaTierDevice, LayerRows
from moet.residency.cuda.kernels import Staged
from moet.residency.cuda.mailbox import HOST_ENTRY, Mailbox, mailbox_type

from .source import RandomRows


def memory_at(address: int, size: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


class StandInDriver:
    """As `Driver`; copies run in a thread a stream, in two halves. `pins_left`: chunks that can
    still be pinned."""

    def __init__(self, device: torch.device) -> None:
        self.pinned: dict[int, int] = {}
        self.host: dict[int, mmap.mmap] = {}
        self.pins_left = 1 << 30
        self.gpu_left = 1 << 40
        self._streams: dict[int, ThreadPoolExecutor] = {}
        self.broken_copies = False
        self._next = 0
        self._pace = Random(1)

    @contextmanager
    def current(self) -> Iterator[None]:
        yield

    def stream(self) -> int:
        self._next += 1
        self._streams[self._next] = ThreadPoolExecutor(1)
        return self._next

    def launching(self) -> int:
        return 0

    def capturing(self) -> bool:
        return False

    def event(self) -> int:
        self._next += 1
        return self._next

    def adopt_thread(self) -> None:
        """Nothing: memory has no context here."""

    def start_copies(self, copies: np.ndarray) -> None:
        if self.broken_copies:
            raise CudaError("the copy engine has failed.")
        for line in copies.tolist():
            self._streams[line[3]].submit(self._copy, *line, self._pace.choice((0.0, 0.0, 0.0005)))

    def _copy(
        self, target: int, source: int, size: int, stream: int, word: int, number: int, nap: float
    ) -> None:
        half = size // 2
        ctypes.memmove(target, source, half)
        time.sleep(nap)
        ctypes.memmove(target + half, source + half, size - half)
        memory_at(word, 8).view(np.uint64)[0] = number

    def follow(self, stream: int, other: int, event: int) -> None:
        """Kernels run in one thread here."""

    def gpu_memory(self, sizes: list[int], stream: int) -> list[Tensor]:
        if sum(sizes) > self.gpu_left:
            raise ConfigError("no GPU memory is left.")
        return [torch.full((size,), 0xEE, dtype=torch.uint8) for size in sizes]

    def host_memory(self, size: int) -> int:
        pages = mmap.mmap(-1, size)
        address = np.frombuffer(pages, np.uint8).ctypes.data
        self.host[address] = pages
        return address

    def free_host_memory(self, address: int) -> None:
        del self.host[address]

    def pin(self, address: int, size: int) -> int:
        if not self.pins_left:
            raise ConfigError("there is not enough memory that could be pinned.")
        self.pins_left -= 1
        self.pinned[address] = size
        return address

    def unpin(self, address: int) -> None:
        del self.pinned[address]

    def synchronize(self) -> None:
        for stream in self._streams.values():
            stream.submit(lambda: None).result()

    def destroy(self, streams: list[int], events: list[int]) -> None:
        for stream in streams:
            self._streams.pop(stream).shutdown()


class StandInKernels:
    """As `TierKernels`: one thread does what the kernels do, one launch after another."""

    def __init__(
        self,
        code: np.ndarray,
        planes: Mapping[int, int],
        mailbox: Mailbox,
        device: torch.device,
    ) -> None:
        self.code, self.experts, self.row_bytes = torch.from_numpy(code), code.shape[1], planes
        self.dummy = torch.zeros(max(planes.values()), dtype=torch.uint8)
        self.plane = {c: i for i, c in enumerate(planes)}
        shape = (len(planes), *code.shape)
        self.mail = mailbox.device_side.view(mailbox_type(*shape))[0]
        self.table = mailbox.table.reshape(shape)
        self.answered = mailbox.answer
        self.lane = ThreadPoolExecutor(1)
        self.jobs: list[Future[object]] = []
        self.open = self.local = self.failed = self.decode = 0
        self.stale, self.unanswered = True, False
        self.entries = self.table.copy()
        self.begun = 0
        self.use = np.zeros(shape, np.uint64)
        self.rows = np.zeros((len(planes), 2, 3), np.uint64)

    def launch(self, job: Callable[[], object]) -> None:
        self.jobs.append(self.lane.submit(job))

    def synchronize(self) -> None:
        for job in self.jobs:
            job.result(timeout=60)
        self.jobs.clear()

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
        self.launch(
            lambda: self._ensure(
                ids, layer, begin, decode, patience, code, address, precision, staged
            )
        )

    def stage(self, layer: int, code: Tensor, into: Staged, blocks: int, stream: int) -> None:
        self.launch(lambda: self._stage(layer, code, into))

    def foresee(self, routes: Routes, hints: np.ndarray) -> None:
        kind = hints_type(len(routes.layers), len(self.plane), self.experts)
        self.routes, self.hints = routes, hints.view(kind)[0]

    def ahead(self, token_ids: Tensor, code: Tensor) -> None:
        self.launch(lambda: self._ahead(token_ids, code))

    def finish(self) -> None:
        self.launch(self._finish)

    def _ensure(
        self,
        ids: Tensor,
        layer: int,
        begin: int,
        decode: bool,
        patience: int,
        code: Tensor,
        address: Tensor,
        precision: Tensor,
        staged: Staged | None,
    ) -> None:
        mail = self.mail
        self.unanswered &= int(self.answered[0]) != int(mail["request"])
        if begin:
            self.begun += 1
            self.open, self.decode = begin, int(decode)
            self.local, self.failed, self.stale = 1, 0, layer != 0
            mail["begun"] = self.begun
            self.entries = self.table.copy()
        used = [e for e in ids.unique().tolist() if 0 <= e < self.experts]
        where = {e: (self.plane[int(code[layer, e])], layer, e) for e in used}
        table = self.table if self.stale else self.entries
        entry = {e: int(table[where[e]]) for e in used}
        for e in used:
            tier = 2 if not entry[e] else entry[e] & HOST_ENTRY
            self.local &= tier == 0
            self.use[where[e]] += np.uint64(decode)
            self.rows[where[e][0], int(not decode), tier] += np.uint64(1)
        copies = {} if staged is None else {e: int(s) for e, s in enumerate(staged.slot) if s >= 0}
        if self.unanswered:
            copies, entry = {}, dict.fromkeys(used, 0)
        else:
            entry.update({e: int(self.table[where[e]]) for e in used if not entry[e]})
        missing = [e for e in used if not entry[e] and e not in copies]
        if missing and not self.failed and not self.unanswered:
            for name, chosen in (("missing", missing), ("present", [e for e in used if entry[e]])):
                bits = np.zeros((len(mail[name]), mail[name].shape[1] * 32), np.uint8)
                bits[[where[e][0] for e in chosen], chosen] = 1
                mail[name][:] = np.packbits(bits, axis=1, bitorder="little").view(np.uint32)
            number = int(mail["request"]) + 1
            mail["layer"] = layer
            mail["request"] = number
            self.stale = True
            life, seen = int(self.answered[1]), time.monotonic()
            while int(self.answered[0]) != number and not self.unanswered:
                if int(self.answered[1]) != life:
                    life, seen = int(self.answered[1]), time.monotonic()
                self.unanswered = time.monotonic() - seen > patience / 1e3
                time.sleep(2e-5)
            if not self.unanswered:
                entry.update({e: int(self.table[where[e]]) for e in missing})
        if any(not entry[e] and e not in copies for e in used) and not self.failed:
            self.failed = 1
            mail["failed_step"] = self.begun
            mail["failures"] += 1
        address.zero_()
        precision.copy_(code[layer])
        for e in used:
            if staged is not None and e in copies:
                address[e] = staged.rows[copies[e]].data_ptr()
                continue
            host = entry[e] & HOST_ENTRY
            address[e] = entry[e] - host if entry[e] else self.dummy.data_ptr()
            precision[e] += REMOTE * host

    def _stage(self, layer: int, code: Tensor, into: Staged) -> None:
        into.slot.fill_(-1)
        slots = len(into.rows)
        into.rows.fill_(0xEE)
        staged = 0
        for e, kind in enumerate(code[layer].tolist()):
            entry = int(self.table[self.plane[kind], layer, e])
            if entry & HOST_ENTRY and staged < slots:
                row = memory_at(entry - HOST_ENTRY, self.row_bytes[kind])
                into.rows[staged, : row.size] = torch.from_numpy(row.copy())
                into.slot[e] = staged
                staged += 1

    def _ahead(self, token_ids: Tensor, code: Tensor) -> None:
        missing = self.hints["missing"]
        bits = np.zeros((*missing.shape[:2], missing.shape[2] * 32), np.uint8)
        for i, (layer, table) in enumerate(zip(*vars(self.routes).values(), strict=True)):
            known = token_ids[(token_ids >= 0) & (token_ids < len(table))].long()
            for e in table[known].unique().tolist():
                plane = self.plane[int(code[layer, e])]
                bits[i, plane, e] = not self.table[plane, layer, e]
        missing[:] = np.packbits(bits, axis=2, bitorder="little").view(np.uint32)
        self.hints["number"] += np.uint64(bits.any())

    def _finish(self) -> None:
        mail = self.mail
        mail["use"][:], mail["rows"][:] = self.use, self.rows
        if self.open == 2 and self.decode:
            mail["steps"] += 1
            mail["steps_local"] += self.local
        self.open = 0
        mail["done"] = self.begun


class StandInSteps:
    """What a test does on the device, on the stand-in: `GpuSteps` is the same on a GPU."""

    torch_device = torch.device("cpu")

    def __init__(self, device: CudaTierDevice, source: RandomRows, code: np.ndarray) -> None:
        self._kernels: StandInKernels = device._kernels  # type: ignore[assignment]
        self._source, self._experts = source, code.shape[1]
        self._lock = threading.Lock()
        self.wrong = self.zeros = 0

    def check(self, layer: int, rows: LayerRows, ids: Tensor, code: Tensor) -> None:
        """Compares all bytes of the rows in the snapshot, in the order of launches, with those of
        the precisions in `code`."""
        self._kernels.launch(lambda: self._check(layer, rows, ids, code))

    def _check(self, layer: int, rows: LayerRows, ids: Tensor, code: Tensor) -> None:
        for e in ids.unique().tolist():
            if not 0 <= e < self._experts:
                continue
            address = int(rows.address[e])
            if address == self._kernels.dummy.data_ptr():
                self.zeros += 1
                continue
            plane = self._kernels.plane[int(code[layer, e])]
            self.wrong += int(rows.precision[e]) & ~REMOTE != int(code[layer, e])
            expected = list(self._source.rows.values())[plane][layer, e]
            for _ in range(2):
                self.wrong += not np.array_equal(memory_at(address, expected.size), expected)

    def write(self, target: Tensor, value: Tensor) -> None:
        """In the order of launches."""
        self._kernels.launch(lambda: target.copy_(value))

    def captured(self, steps: Callable[[], None]) -> Callable[[], None]:
        """On a GPU, a graph."""
        return steps

    def synchronize(self) -> None:
        self._kernels.synchronize()
