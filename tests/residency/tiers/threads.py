"""A device made of threads and ordinary memory, for rows of a real pack."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from random import Random

import numpy as np

from moet.formats.layout import Precision
from moet.residency.metrics import Phase
from moet.residency.tiers import Copy, Counts, Entry, Place, Request, Tier, TierDevice

Row = tuple[Precision, int, int]


class ThreadCopy(Copy):
    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def done(self) -> bool:
        if not self._future.done():
            return False
        self._future.result()
        return True


class StepError(Exception):
    """A step whose request was answered with a failure. number: of the step."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class ThreadDevice(TierDevice):
    """`step` is called in a thread of the test, and is a step of the device.

    Args:
        expected: the bytes of every row.
    """

    def __init__(self, shape: tuple[int, int], expected: Mapping[Row, bytes], seed: int) -> None:
        self.memory: dict[tuple[Precision, Tier], list[np.ndarray]] = {}
        self.table: dict[Row, Place] = {}
        self.expected = expected
        self.broken_copies = False
        self._pace = Random(seed)
        self._engine = ThreadPoolExecutor(2)
        self._request: Request | None = None
        self._posted, self._answered = threading.Condition(), threading.Event()
        self._ok = False
        self._number = self._begun = self._done = 0
        precisions = {row[0] for row in expected}
        self._use = {p: np.zeros(shape, np.int64) for p in precisions}
        self._rows = {(p, phase): np.zeros(3, np.int64) for p in precisions for phase in Phase}
        self._decoded = self._local = 0

    def resize(self, precision: Precision, tier: Tier, places: int, row_bytes: int) -> None:
        memory = self.memory.setdefault((precision, tier), [])
        del memory[places:]
        memory += [np.zeros(row_bytes, np.uint8) for _ in range(places - len(memory))]

    def view(self, place: Place) -> np.ndarray:
        return self.memory[place[:2]][place.slot]

    def start_copy(self, source: Place, target: Place) -> ThreadCopy:
        return ThreadCopy(
            self._engine.submit(self._copy, self.view(source), self.view(target), self._nap())
        )

    def publish(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            if entry.place is None:
                del self.table[entry[:3]]
            else:
                self.table[entry[:3]] = entry.place

    def begun(self) -> int:
        return self._begun

    def done(self) -> int:
        return self._done

    def poll(self) -> Request | None:
        return self._request

    def answer(self, number: int, ok: bool) -> None:
        assert self._request is not None
        assert self._request.number == number
        self._request, self._ok = None, ok
        self._answered.set()

    def counts(self) -> Counts:
        return Counts(self._decoded, self._local, self._use, self._rows)

    def live(self) -> None:
        pass

    def wait(self, seconds: float, seen: int) -> None:
        with self._posted:
            self._posted.wait_for(lambda: self._number > seen, seconds)

    def close(self) -> None:
        self._engine.shutdown()

    def step(self, layers: Sequence[tuple[int, Sequence[tuple[Precision, int]]]]) -> None:
        """Reads the rows of each layer and compares them; raises StepError if the step fails."""
        self._begun += 1
        local, failed = True, False
        for layer, used in layers:
            rows: list[Row] = [(p, layer, e) for p, e in used]
            found = {row: self.table.get(row) for row in rows}
            for row, place in found.items():
                tier = Tier.DISK if place is None else place.tier
                local &= tier == Tier.GPU
                self._rows[row[0], Phase.DECODE][tier] += 1
                self._use[row[0]][row[1:]] += 1
            missing = [row for row in rows if found[row] is None]
            if missing and not self._ensure(layer, missing, [r for r in rows if found[r]]):
                failed = True
                break
            found.update({row: self.table[row] for row in missing})
            for _ in range(2):
                for row, place in found.items():
                    assert place is not None
                    assert self.view(place).tobytes() == self.expected[row], f"{row} is wrong"
                time.sleep(self._nap())
        self._decoded += 1
        self._local += local
        self._done = self._begun
        if failed:
            raise StepError(self._begun)

    def _ensure(self, layer: int, missing: list[Row], present: list[Row]) -> bool:
        self._answered.clear()
        with self._posted:
            self._number += 1
            by_precision = _by_precision(missing), _by_precision(present)
            self._request = Request(self._number, layer, *by_precision)
            self._posted.notify()
        assert self._answered.wait(30), "a request waits for ever"
        return self._ok

    def _nap(self) -> float:
        return self._pace.choice((0.0, 0.0, 0.0001, 0.001))

    def _copy(self, source: np.ndarray, target: np.ndarray, nap: float) -> None:
        if self.broken_copies:
            raise RuntimeError("the copy engine has failed")
        target[: target.size // 2] = source[: source.size // 2]
        time.sleep(nap)
        target[target.size // 2 :] = source[source.size // 2 :]


def _by_precision(rows: Sequence[Row]) -> dict[Precision, list[int]]:
    result: dict[Precision, list[int]] = {}
    for precision, _, expert in rows:
        result.setdefault(precision, []).append(expert)
    return result
