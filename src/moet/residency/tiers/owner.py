"""The one writer of all residency state: a loop of rounds, none of which blocks."""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from moet.errors import MoetError, ResidencyError
from moet.formats.layout import Precision
from moet.residency.heat import HeatKeeper
from moet.residency.policy import I64
from moet.residency.tiers.device import Tier, TierDevice
from moet.residency.tiers.ensure import Ensure
from moet.residency.tiers.fetch import Fetch
from moet.residency.tiers.load import Load
from moet.residency.tiers.metrics import TierCounters
from moet.residency.tiers.options import TierOptions, TierSizes, check_sizes
from moet.residency.tiers.planner import Planner
from moet.residency.tiers.prefetch import Prefetch
from moet.residency.tiers.rows import RowTiers
from moet.residency.tiers.shrink import Shrink
from moet.residency.tiers.table import TableWriter

_LOG = logging.getLogger(__name__)
_FAILURES_KEPT = 256

# How long to wait at a time, in seconds: while the device waits for reads or copies, while others
# are in flight, and while nothing is.
_URGENT_WAIT, _BUSY_WAIT, _IDLE_WAIT = 50e-6, 500e-6, 2e-3

Command = Callable[[Future[None]], None]


@dataclass
class Kind:
    """One precision's rows and what goes on with them. drained: the use that was planned with.
    loaded: rows that the last load has seen to, and all that it has to. fetches: under way.
    prefetch: of what steps are about to use."""

    rows: RowTiers
    planner: Planner
    drained: I64
    keeper: HeatKeeper | None = None
    load: Load | None = None
    loaded: tuple[int, int] = (0, 0)
    fetches: list[Fetch] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prefetch = Prefetch(self.rows, self.planner)


class Owner:
    """Runs the rounds. All methods are called by one thread, but `submit` and `failure`.

    A round looks at what has ended (reads, copies, steps), serves the device's request if there is
    one, and only otherwise does background work: loading, shrinking, planning, moving. While the
    device is to be quiet it starts nothing and changes no table entry.
    """

    def __init__(
        self,
        device: TierDevice,
        table: TableWriter,
        kinds: Mapping[Precision, Kind],
        layers: Sequence[int],
        options: TierOptions,
    ) -> None:
        self.counters = TierCounters()
        self._device, self._table, self._kinds = device, table, kinds
        self._layers, self._options = layers, options
        self._commands: deque[tuple[Command, Future[None]]] = deque()
        self._deferred: list[tuple[Command, Future[None]]] = []
        self._ensure: Ensure | None = None
        self._seen = 0  # the newest request's number
        self._asked = 0.0  # when the open request was seen
        self._pinned_until = 0  # the step whose missing rows are pinned
        self._ahead_until = 0  # the step that the newest hint is about, or the one after
        self._planned = 0  # the newest finished step when moves were last decided
        self._shrinks: list[Shrink] = []
        self._quiet = False
        self._quiet_wanted: list[Future[None]] = []
        self._quiet_held = 0
        self._failures: dict[int, Exception] = {}
        self._broken: Exception | None = None

    def submit(self, command: Command) -> Future[None]:
        """Runs a command in the next round; it resolves the future or sees to it. Any thread."""
        future: Future[None] = Future()
        self._commands.append((command, future))
        return future

    def failure(self, step: int) -> Exception | None:
        """Why a step failed; None if it did not. Of the last 256 failures. Any thread."""
        return self._failures.get(step)

    @property
    def in_flight(self) -> bool:
        """Whether something is on its way that no event announces."""
        return self._ensure is not None or any(
            kind.rows.reading or kind.rows.moving for kind in self._kinds.values()
        )

    def wait(self) -> None:
        """Waits for the next round's work: longest where the device will announce it."""
        urgent = self._ensure is not None
        seconds = _URGENT_WAIT if urgent else _BUSY_WAIT if self.in_flight else _IDLE_WAIT
        # While the device is to be quiet its requests are not served.
        self._device.wait(seconds, sys.maxsize if self._quiet else self._seen)

    def round(self) -> bool:
        """Does what can be done now; whether there was anything.

        An error that is nobody's (a failed copy, a bug) ends all changes: from then on requests
        fail with it, and rows stay where they are.
        """
        self._device.live()
        try:
            busy = self._run_commands() | self._look_ahead()
            return (self._refuse() if self._broken else self._round()) or busy
        except Exception as error:
            _LOG.exception("expert residency has stopped; rows stay where they are.")
            self._broken = ResidencyError(
                f"expert residency has stopped: {error!r}.", "The log has the cause."
            )
            self._give_up(self._broken)
            return True

    def load(self, precision: Precision, future: Future[None]) -> None:
        """Command: fills the tiers."""
        kind = self._kinds[precision]
        kind.load = Load(kind.rows, kind.planner, self._options.io_threads, future)

    def fetch(
        self, precision: Precision, wanted: Sequence[int], failed: set[int], future: Future[None]
    ) -> None:
        """Command: starts to bring in rows (`Fetch`)."""
        kind, at_once = self._kinds[precision], 2 * self._options.io_threads
        kind.fetches.append(Fetch(kind.rows, kind.planner, wanted, at_once, failed))
        future.set_result(None)

    def begin_quiet(self, future: Future[None]) -> None:
        """Command: resolved when nothing is in flight and nothing will start."""
        if self._quiet:
            self._quiet_held += 1
            future.set_result(None)
        else:
            self._quiet_wanted.append(future)

    def end_quiet(self, future: Future[None]) -> None:
        """Command: takes back one `begin_quiet`."""
        self._quiet_held -= 1
        self._quiet = self._quiet_held > 0
        future.set_result(None)

    def resize(self, precision: Precision, sizes: TierSizes, future: Future[None]) -> None:
        """Command: gives both tiers of a precision other sizes, the larger ones at once."""
        if self._quiet and not self._broken:
            self._deferred.append((partial(self.resize, precision, sizes), future))
            return
        kind = self._kinds[precision]
        rows = kind.rows
        if any(shrink.rows is rows for shrink in self._shrinks):
            raise ResidencyError(f"the {precision} tiers are being made smaller already.")
        limits = check_sizes(precision, rows.owned, sizes, rows.row_bytes, self._options)
        wanted = ((Tier.GPU, sizes.slots), (Tier.ARENA, sizes.places))
        for tier, count in wanted:
            if count > rows.places(tier).count:
                rows.resize(tier, count)
        kind.planner.limits = limits
        parts: list[Future[None]] = []
        for tier, count in wanted:
            if count < rows.places(tier).count:
                parts.append(Future())
                self._shrinks.append(Shrink(rows, kind.planner, tier, count, parts[-1]))

        def ended(part: Future[None]) -> None:
            if future.done():
                return
            if error := part.exception():
                future.set_exception(error)
            elif all(other.done() for other in parts):
                future.set_result(None)

        if not parts:
            future.set_result(None)
        for part in parts:
            part.add_done_callback(ended)

    def close(self) -> None:
        """Lets nobody wait for what will not come."""
        self._broken = ResidencyError("residency has been closed.")
        self._run_commands()
        self._give_up(self._broken)
        self._refuse()

    def _give_up(self, error: Exception) -> None:
        """Fails all that is under way."""
        waiting = [shrink.future for shrink in self._shrinks] + self._quiet_wanted
        waiting += [kind.load.future for kind in self._kinds.values() if kind.load is not None]
        for future in waiting:
            if not future.done():
                future.set_exception(error)
        self._shrinks, self._quiet_wanted = [], []

    def _round(self) -> bool:
        done = self._device.done()
        errors: dict[Precision, dict[int, Exception]] = {}
        busy = False
        for precision, kind in self._kinds.items():
            if kind.rows.reading:
                results, errors[precision] = kind.rows.finish_reads()
                for read in results:
                    self.counters.add_read(read)
                busy |= bool(results or errors[precision])
            busy |= bool(kind.rows.moving) and kind.rows.finish_moves()
            if kind.load is not None:
                kind.load.arrived(errors.get(precision, {}))
            for fetch in kind.fetches:
                fetch.arrived(errors.get(precision, {}))
        self._table.flush()
        if self._quiet:
            return busy
        answered = self._serve(done, errors)
        if answered is not None:
            if self._ensure is not None and self._ensure.all_started and not self._quiet_wanted:
                self._prefetch(done)  # behind the reads that the step waits for
            # Not busy while reads are waited for: their threads need the interpreter.
            return busy or answered
        if self._pinned_until and done >= self._pinned_until:
            self._pinned_until = 0
            for kind in self._kinds.values():
                kind.rows.pinned = ()
        for kind in self._kinds.values():
            busy |= kind.rows.reclaim(done, None)
        if self._quiet_wanted:
            self._try_quiet()
        else:
            busy |= self._background(done)
            self._table.flush()
        return busy

    def _serve(self, done: int, errors: Mapping[Precision, Mapping[int, Exception]]) -> bool | None:
        """Goes on with the open request; whether it was answered, None if there is none."""
        if self._ensure is None:
            request = self._device.poll()
            if request is None:
                return None
            self._seen = request.number
            self._asked = time.perf_counter()
            self._pinned_until = self._device.begun()
            tiers = {precision: kind.rows for precision, kind in self._kinds.items()}
            planners = {precision: kind.planner for precision, kind in self._kinds.items()}
            self._ensure = Ensure(request, self._pinned_until, tiers, planners, self._table)
        ensure = self._ensure
        ready = ensure.advance(done, errors)
        self._table.flush()
        if ready:
            self._ensure = None
            self._answer(ensure.request.number, ensure.step, ensure.request.layer, ensure.error)
        return ready

    def _answer(self, number: int, step: int, layer: int, error: Exception | None) -> None:
        self.counters.requests += 1
        if error is not None:
            self.counters.failed_requests += 1
            if not isinstance(error, MoetError):
                error = ResidencyError(f"layer {self._layers[layer]}: {error!r}")
            self._failures[step] = error
            while len(self._failures) > _FAILURES_KEPT:
                del self._failures[next(iter(self._failures))]
            _LOG.error("step %d fails: %s", step, error)
        self._device.answer(number, error is None)
        self.counters.stall_seconds += time.perf_counter() - self._asked

    def _look_ahead(self) -> bool:
        """Takes note of what steps are about to use; whether there was anything."""
        hint = self._device.poll_ahead()
        if hint is None:
            return False
        self._ahead_until = self._device.begun() + 1
        for precision, kind in self._kinds.items():
            kind.prefetch.ask(hint.get(precision, ()))
        return True

    def _prefetch(self, done: int) -> bool:
        if done >= self._ahead_until:
            for kind in self._kinds.values():
                kind.prefetch.ask(())
            return False
        return sum(kind.prefetch.advance() for kind in self._kinds.values()) > 0

    def _background(self, done: int) -> bool:
        busy = self._prefetch(done)
        if done - self._planned >= self._options.plan_every:
            self._plan(done)
        self._shrinks = [shrink for shrink in self._shrinks if not shrink.advance()]
        for kind in self._kinds.values():
            if kind.load is not None:
                over = kind.load.advance()
                kind.loaded = (kind.load.seen, kind.load.total)
                kind.load = None if over else kind.load
            kind.fetches = [fetch for fetch in kind.fetches if not fetch.advance()]
            busy |= kind.planner.move()
        return busy

    def _plan(self, done: int) -> None:
        self._planned = done
        counts = self._device.counts()
        for precision, kind in self._kinds.items():
            use = np.array(counts.use[precision])
            kind.planner.plan(use - kind.drained, done)
            kind.drained = use
            if kind.keeper is not None:
                kind.keeper.end_step(done)

    def _try_quiet(self) -> None:
        # A step that runs could still ask for rows, and would not be answered.
        if self.in_flight or self._device.begun() != self._device.done():
            return
        self._quiet = True
        for future in self._quiet_wanted:
            self._quiet_held += 1
            future.set_result(None)
        self._quiet_wanted = []

    def _run_commands(self) -> bool:
        """Runs the commands that have come; a resize while the device is quiet, after that."""
        deferred, self._deferred = self._deferred, []
        commands = [self._commands.popleft() for _ in range(len(self._commands))]
        for command, future in [*deferred, *commands]:
            self._run(command, future)
        return bool(commands)

    def _run(self, command: Command, future: Future[None]) -> None:
        try:
            if self._broken:
                raise self._broken
            command(future)
        except Exception as error:
            if not isinstance(error, MoetError):
                _LOG.exception("a residency command failed")
            future.set_exception(error)

    def _refuse(self) -> bool:
        """Answers requests after an error that ended all changes."""
        request = self._device.poll()
        if request is None:
            return False
        self._ensure = None
        self._asked = time.perf_counter()
        self._answer(request.number, self._device.begun(), request.layer, self._broken)
        return True
