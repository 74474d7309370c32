"""A device that exists only as bookkeeping, whose steps, copies and reads go on at random.

Everything runs in one thread: whenever the manager calls the device, and between its rounds, other
actors may take some of their smallest steps. A seed fixes the whole history.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np

from moet.errors import ConfigError, PackError
from moet.formats.layout import Precision
from moet.pack.source import RowKey, RowSource
from moet.residency.metrics import Phase
from moet.residency.tiers import Copy, Counts, Entry, Place, Request, Tier, TierDevice

BASE, FP4 = Precision.BASE, Precision.MXFP4
GARBAGE = -1
MAX_PLACES = 64

Row = tuple[Precision, int, int]  # precision, layer index, expert


def code(precision: Precision, layer: int, expert: int) -> int:
    """The bytes of a row, as one int64."""
    return (precision == FP4) * 1_000_000 + layer * 1000 + expert + 1


class SimSource(RowSource):
    """Rows of 8 bytes that say which row they are. Rows in `broken` fail halfway."""

    def __init__(self, layers: Sequence[int], num_experts: int) -> None:
        self.layers, self.num_experts = tuple(layers), num_experts
        self.layouts: Mapping[Precision, Any] = {
            p: SimpleNamespace(row_bytes=size) for p, size in ((BASE, 4096), (FP4, 8192))
        }
        self.identity = "sim"
        self.broken: set[RowKey] = set()
        self.reads = 0

    def read(self, key: RowKey, out: np.ndarray) -> int:
        self.reads += 1
        if key in self.broken:
            raise PackError(f"layer {key.layer}, expert {key.expert}: checksum mismatch.")
        out.view(np.int64)[0] = code(key.precision, self.layers.index(key.layer), key.expert)
        return 4096

    def factors(self, layer: int, precision: Precision) -> Any:
        raise AssertionError("nobody asks for factors here")


class SimExecutor(Executor):
    """Runs a job when it is told to, in any order."""

    def __init__(self) -> None:
        self.jobs: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.jobs.append((future, lambda: work(*args, **kwargs)))
        return future

    def run(self, number: int) -> None:
        future, work = self.jobs.pop(number)
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        while self.jobs:
            self.run(0)


class SimCopy(Copy):
    def __init__(self, source: Place, target: Place) -> None:
        self.source, self.target, self.over = source, target, False

    def done(self) -> bool:
        return self.over


# A step: its phase, and for each layer the experts it uses, by precision.
Step = tuple[Phase, Sequence[tuple[int, Mapping[Precision, Sequence[int]]]]]


class SimDevice(TierDevice):
    """Checks all that a real device would suffer from silently.

    A step *holds* every place that it has read an address of, until it is done or, at the latest
    that is safe, until it waits in a later layer. A place that is held is never written, and has
    the row's bytes whenever it is looked at.
    """

    def __init__(self, layers: int, experts: int, rng: Random) -> None:
        self.rng = rng
        self.memory: dict[tuple[Precision, Tier], np.ndarray] = {}
        self.size: dict[tuple[Precision, Tier], int] = {}
        self.limit = MAX_PLACES  # more places than this cannot be had
        self.table: dict[Row, Place] = {}
        self.holds: dict[Place, Row] = {}
        self.copies: list[SimCopy] = []
        self.capturing = False
        self.request: Request | None = None
        self.answered: dict[int, bool] = {}
        self.hint: dict[Precision, list[int]] | None = None
        self.hints = False  # whether steps say ahead what they are about to use
        self.requests = 0
        self.failed: list[int] = []
        self.steps: list[Step] = []
        self.executor = SimExecutor()
        self.gpu: Iterator[None] = iter(())
        self.gpu_over = True
        self.preempt = True
        self.disk_speed = 0.5
        self._begun = self._done = 0
        self._use = {p: np.zeros((layers, experts), np.int64) for p in (BASE, FP4)}
        self._rows = {(p, phase): np.zeros(3, np.int64) for p in (BASE, FP4) for phase in Phase}
        self._decoded = self._local = 0
        self.closed = False

    # What the manager calls.

    def resize(self, precision: Precision, tier: Tier, places: int, row_bytes: int) -> None:
        assert not self.capturing
        before = self.size.get((precision, tier), 0)
        if places > max(before, self.limit):
            raise ConfigError("out of memory.")
        if not before:
            self.memory[precision, tier] = np.full(MAX_PLACES, GARBAGE, np.int64)
        for slot in range(places, before):
            self._write(Place(precision, tier, slot))
        self.size[precision, tier] = places

    def view(self, place: Place) -> np.ndarray:
        assert not self.capturing
        assert place.tier == Tier.ARENA
        self._write(place)
        return self.memory[place[:2]][place.slot : place.slot + 1].view(np.uint8)

    def start_copy(self, source: Place, target: Place) -> SimCopy:
        assert not self.capturing
        self._others()
        self._write(target)
        assert self._value(source) != GARBAGE
        copy = SimCopy(source, target)
        self.copies.append(copy)
        return copy

    def publish(self, entries: Sequence[Entry]) -> None:
        assert not self.capturing
        self._others(0.2)  # steps begin and read old entries
        for entry in entries:
            self._others()
            row, place = entry[:3], entry.place
            if place is None:
                del self.table[row]
                continue
            assert self._value(place) == code(*row), "published before the bytes were there"
            assert self.holds.get(place, row) == row
            self.table[row] = place
        self._others()

    def begun(self) -> int:
        self._others()
        return self._begun

    def done(self) -> int:
        self._others()
        return self._done

    def poll(self) -> Request | None:
        self._others()
        return self.request

    def poll_ahead(self) -> dict[Precision, list[int]] | None:
        self._others()
        hint, self.hint = self.hint, None
        return hint

    def answer(self, number: int, ok: bool) -> None:
        assert self.request is not None
        assert self.request.number == number
        self.request = None
        self.answered[number] = ok
        self._others()

    def counts(self) -> Counts:
        return Counts(self._decoded, self._local, self._use, self._rows)

    def live(self) -> None:
        pass

    def wait(self, seconds: float, seen: int) -> None:
        self.tick()

    def close(self) -> None:
        assert not self.copies
        assert not self.holds
        self.closed = True

    # What goes on beside it.

    def launch(self, steps: Sequence[Step]) -> None:
        assert self.gpu_over
        self.gpu, self.gpu_over = self._run(steps), False

    def tick(self) -> None:
        """One of the other actors takes a small step."""
        choice = self.rng.random()
        if choice < 0.6:
            if next(self.gpu, self) is self:
                self.gpu_over = True
        elif choice < 0.8:
            if self.copies:
                self._finish(self.copies.pop(self.rng.randrange(len(self.copies))))
        elif self.executor.jobs and self.rng.random() < self.disk_speed:
            self.executor.run(self.rng.randrange(len(self.executor.jobs)))

    def _others(self, long: float = 0.05) -> None:
        if self.preempt:
            more = 0.9 if self.rng.random() < long else 0.3
            while self.rng.random() < more:
                self.tick()

    def _finish(self, copy: SimCopy) -> None:
        value = self._value(copy.source)
        assert value != GARBAGE, "the source of a copy was written"
        assert copy.target not in self.holds
        self.memory[copy.target[:2]][copy.target.slot] = value
        copy.over = True

    def _value(self, place: Place) -> int:
        assert place.slot < self.size[place[:2]]
        return int(self.memory[place[:2]][place.slot])

    def _write(self, place: Place) -> None:
        """The place's bytes are undefined from now on."""
        assert place not in self.holds, f"{place} is written while {self.holds[place]} is read"
        assert all(place not in (copy.source, copy.target) for copy in self.copies)
        assert place not in self.table.values(), f"{place} is written while the table points to it"
        self.memory[place[:2]][place.slot] = GARBAGE

    def _look(self, place: Place, row: Row) -> None:
        found = self._value(place)
        assert found == code(*row), f"{row} at {place} reads {found}"

    def _hold(self, place: Place, row: Row) -> None:
        assert self.holds.setdefault(place, row) == row
        self._look(place, row)

    def _run(self, steps: Sequence[Step]) -> Iterator[None]:
        for phase, layers in steps:
            if self.hints and self.rng.random() < 0.8:
                self.hint = self._foresee(layers)
                yield
            number = self._begun = self._begun + 1
            yield
            local = True
            for layer, used in layers:
                rows: list[Row] = [(p, layer, e) for p, experts in used.items() for e in experts]
                self.rng.shuffle(rows)
                found: dict[Row, Place] = {}
                for row in rows:
                    place = self.table.get(row)
                    if place is not None:
                        self._hold(place, row)
                        found[row] = place
                    tier = Tier.DISK if place is None else place.tier
                    local &= tier == Tier.GPU
                    self._rows[row[0], phase][tier] += 1
                    if phase == Phase.DECODE:
                        self._use[row[0]][row[1:]] += 1
                    yield
                missing = [row for row in rows if row not in found]
                if missing:
                    ok = yield from self._ensure(layer, missing, found)
                    if not ok:
                        self.failed.append(number)
                        found.update({r: self.table[r] for r in missing if r in self.table})
                        for row in missing:
                            if row in found:
                                self._hold(found[row], row)
                for row, place in found.items():
                    self._look(place, row)
                    yield
                for row, place in found.items():
                    self._look(place, row)
            for place, row in self.holds.items():
                self._look(place, row)
            self.holds.clear()
            self._decoded += phase == Phase.DECODE
            self._local += phase == Phase.DECODE and local
            self._done = number
            yield

    def _foresee(self, layers: Sequence[Any]) -> dict[Precision, list[int]]:
        """The rows on disk of a step's first layers; or now and then any rows."""
        experts = next(iter(self._use.values())).shape[1]
        hint: dict[Precision, list[int]] = {}
        for layer, used in layers[: self.rng.randint(1, 3)]:
            for precision, chosen in used.items():
                rows = [layer * experts + e for e in chosen]
                if self.rng.random() < 0.2:
                    rows = self.rng.choices(range(self._use[precision].size), k=4)
                hint.setdefault(precision, []).extend(rows)
        return hint

    def _ensure(self, layer: int, missing: list[Row], found: dict[Row, Place]) -> Iterator[None]:
        """Posts a request and waits for its answer."""
        for place, row in self.holds.items():
            self._look(place, row)
        self.holds = {place: row for row, place in found.items()}
        self.requests += 1
        number = self.requests
        self.request = Request(number, layer, _by_precision(missing), _by_precision(found))
        while number not in self.answered:
            for row, place in found.items():
                self._look(place, row)
            yield
        if self.answered[number]:
            for row in missing:
                found[row] = self.table[row]
                self._hold(found[row], row)
                yield
        return self.answered[number]


def _by_precision(rows: Any) -> dict[Precision, list[int]]:
    result: dict[Precision, list[int]] = {}
    for precision, _, expert in rows:
        result.setdefault(precision, []).append(expert)
    return result
