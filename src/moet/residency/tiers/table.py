"""The order that keeps readers safe: bytes, then the table, then the epoch, then reuse."""

from __future__ import annotations

from moet.residency.tiers.device import Entry, TierDevice
from moet.residency.tiers.places import Places


class TableWriter:
    """Collects table changes and the places that they give up; `flush` makes them take effect.

    The epoch is read after the table has changed: a step that had begun by then may have read the
    old entry, and one that begins later reads the new one.
    """

    def __init__(self, device: TierDevice) -> None:
        self._device = device
        self._entries: list[Entry] = []
        self._old: list[tuple[Places, int, int]] = []

    @property
    def giving_up(self) -> int:
        """Places that will be retired by the next flush."""
        return len(self._old)

    def point(self, entry: Entry, old: tuple[Places, int, int] | None = None) -> None:
        """Changes an entry, whose row's bytes are in place; old: (tier, place, row) given up."""
        self._entries.append(entry)
        if old is not None:
            self._old.append(old)

    def flush(self) -> bool:
        """Publishes; whether there was anything to publish."""
        if not self._entries:
            return False
        self._device.publish(self._entries)
        epoch = self._device.begun()
        for places, index, row in self._old:
            places.retire(index, row, epoch)
        self._entries, self._old = [], []
        return True
