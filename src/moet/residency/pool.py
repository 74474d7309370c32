"""The slots of one precision: which row each holds, which rows stay, which slot is next."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from moet.errors import ConfigError, ResidencyError
from moet.formats.layout import Precision
from moet.residency.backend import SlotBackend
from moet.residency.metrics import PoolMetrics
from moet.residency.policy import Policy

I64 = NDArray[np.int64]
Mask = NDArray[np.bool_]


class SlotPool:
    """Bookkeeping of one pool; only the thread that holds the lease calls it.

    Rows are named by flat index, layer index · experts + expert. A row that decode *keeps* stays
    until the policy gives it up; any other is only *passing*. A slot is in one of three states:

    * idle: empty, or with a passing row that no lease needs. It is in `_idle`, in order of reuse.
    * kept: with a kept row.
    * leased: with a passing row that the lease needs, or being filled.

    At most `slots − streaming` rows are kept, so at least `streaming` slots are idle or leased with
    passing rows, whatever decode keeps: a lease can always go on (see `pin`).

    The order of events that keeps every reader safe: `take` clears the old row's address and hands
    out the slot only when the epochs that read it are over; the slot is written; `publish` sets the
    new row's address after that.

    Args:
        owned: which rows are of this precision, bool [layers, experts].
        slots: places for rows; more than there are rows are not made.
        streaming: of these, slots never used for keeping; 0 if all rows have a slot.

    Raises ConfigError for a pool that is too small to work.
    """

    def __init__(
        self,
        precision: Precision,
        owned: Mask,
        slots: int,
        streaming: int,
        row_bytes: int,
        backend: SlotBackend,
    ) -> None:
        self.precision = precision
        self.rows = np.flatnonzero(owned)
        self.row_bytes = row_bytes
        self.slots = min(slots, len(self.rows))
        self.streaming = streaming if self.slots < len(self.rows) else 0
        self._keepable = self.slots - self.streaming
        if self._keepable < 1:
            minimum = min(streaming + 1, len(self.rows))
            raise ConfigError(
                f"a pool of {slots} slots for {precision} rows is too small: it needs at least "
                f"{minimum} slots ({minimum * row_bytes / 2**20:.4g} MiB), {streaming} of them "
                f"streaming slots.",
                "Make the pool larger or the number of streaming slots smaller.",
            )
        self.address = np.zeros(owned.shape, np.int64)  # 0: not resident
        self.kept = np.zeros(owned.size, np.bool_)  # by row
        self.evictions = 0
        self.promotions = 0
        self._backend = backend
        self._slot_of = np.full(owned.size, -1, np.int64)  # by row; −1: not resident
        self._row_in = np.full(self.slots, -1, np.int64)  # by slot; −1: empty
        self._epoch = np.zeros(self.slots, np.int64)  # by slot; the newest that reads it
        self._idle: OrderedDict[int, None] = OrderedDict.fromkeys(range(self.slots))
        backend.allocate(precision, self.slots, row_bytes)

    @property
    def keepable(self) -> int:
        """How many rows can be kept."""
        return self._keepable

    def unkeep(self, rows: I64) -> None:
        """These rows, kept and not leased, are only passing from now on."""
        self.kept[rows] = False
        for slot in self._slot_of[rows].tolist():
            self._idle[slot] = None

    def resident(self, row: int) -> bool:
        return bool(self._slot_of[row] >= 0)

    def pin(self, rows: I64, decode: Mask, policy: Policy, coming: Mask) -> tuple[Mask, int]:
        """Begins a lease of `rows` (ascending); `decode` marks those that decode needs, `coming`
        those that are being read ahead, into slots of their own.

        First decides, by decode's needs alone, which rows are kept from now on. Afterwards those of
        `rows` that are resident stay so until `release`.

        Returns (bool mask of the rows to be read, limit), where a wave must not hold more than
        `limit` passing rows that are yet to get a slot. If such waves of ascending rows are read,
        used and released one after the other, `take` always finds a slot for the current one:
        `to_keep` slots are set aside for the rows that will be kept, the others are at least the
        limit, and a wave that is released gives its passing rows' slots back. A wave takes half of
        those where it can, so that the next is read meanwhile. Slots that are filled ahead for
        other layers may be as many as `streaming − 1`: one is left for passing rows then.
        """
        self._admit(rows[decode & ~self.kept[rows]], policy)
        found = self._slot_of[rows] >= 0
        for slot in self._slot_of[rows[found]].tolist():
            self._idle.pop(slot, None)
        kept = self.kept[rows]
        to_keep = int(np.count_nonzero(kept & ~(found | coming)))
        to_pass = int(np.count_nonzero(~(kept | found | coming)))
        # Passing rows that are here may hold all the slots that others need: drop the last ones.
        for last in np.flatnonzero(found & ~kept)[::-1].tolist():
            if len(self._idle) >= to_keep + min(to_pass, self.streaming):
                break
            self._evict(int(self._slot_of[rows[last]]))
            found[last] = False
            to_pass += 1
        return ~found, max(1, (len(self._idle) - to_keep) // 2)

    def take(self, row: int, wait: bool) -> int | None:
        """Empties the next slot for `row`: it may be written from now on.

        None when there is no slot yet; with `wait`, waits for the slot's last readers instead.
        """
        slot = next(iter(self._idle), None)
        if slot is None:
            if wait:
                raise ResidencyError(f"no {self.precision} slot is idle; this is a bug in moet.")
            return None
        if self._epoch[slot] > self._backend.completed():
            if not wait:
                return None
            self._backend.wait(int(self._epoch[slot]))
        if self._row_in[slot] >= 0:
            self._evict(slot)
        del self._idle[slot]
        self._row_in[slot] = row
        return slot

    def publish(self, slot: int) -> None:
        """The row's bytes are in the slot: it can be read from now on."""
        row = self._row_in[slot]
        self._slot_of[row] = slot
        self.address.reshape(-1)[row] = self._backend.address(self.precision, slot)

    def let_pass(self, slot: int) -> None:
        """A row that has been read ahead, and that no lease needs."""
        self._idle[slot] = None

    def discard(self, slot: int) -> None:
        """The row could not be read: the slot is empty again."""
        self._empty(slot)

    def begin_epoch(self, rows: I64, epoch: int) -> I64:
        """The addresses of resident `rows`, which the readers of `epoch` use until it has ended."""
        slots = self._slot_of[rows]
        if (slots < 0).any():
            raise ResidencyError(f"a {self.precision} row is not resident; this is a bug in moet.")
        self._epoch[slots] = epoch
        addresses: I64 = self.address.reshape(-1)[rows]
        return addresses

    def release(self, rows: I64) -> None:
        """Ends the lease of `rows`; those that did not become resident are not kept."""
        slots = self._slot_of[rows]
        self.kept[rows[slots < 0]] = False
        for slot in slots[~self.kept[rows] & (slots >= 0)].tolist():
            self._idle[slot] = None

    def preload(self, priority: NDArray[np.float64]) -> list[tuple[int, int]]:
        """Takes slots for the rows of highest priority ([rows]), as many as can be kept.

        For a pool that is still empty. Returns (row, slot) pairs.
        """
        rows = self.rows[np.argsort(-priority[self.rows], kind="stable")][: self._keepable]
        self.kept[rows] = True
        pairs = [(row, self.take(row, wait=False)) for row in rows.tolist()]
        return [(row, slot) for row, slot in pairs if slot is not None]

    def metrics(self) -> PoolMetrics:
        free = int(np.count_nonzero(self._row_in < 0))
        return PoolMetrics(
            slots=self.slots,
            used=self.slots - free,
            free=free,
            kept=int(np.count_nonzero(self.kept)),
            streaming=self.streaming,
            row_bytes=self.row_bytes,
        )

    def _admit(self, candidates: I64, policy: Policy) -> None:
        if candidates.size == 0:
            return
        kept = self.kept.nonzero()[0]
        room = self._keepable - len(kept)
        admitted, victims = policy.admit(candidates, kept, room)
        assert len(admitted) <= room + len(victims), "a policy keeps more than there is room for"
        self.kept[admitted] = True
        self.kept[victims] = False
        self.promotions += len(admitted)
        for slot in self._slot_of[victims].tolist():
            self._idle[slot] = None

    def _evict(self, slot: int) -> None:
        row = self._row_in[slot]
        self.address.reshape(-1)[row] = 0
        self._slot_of[row] = -1
        self.evictions += 1
        self._empty(slot)

    def _empty(self, slot: int) -> None:
        self._row_in[slot] = -1
        self._idle[slot] = None
        self._idle.move_to_end(slot, last=False)
