"""What the GPU and the host tell one another, in pinned host memory that both reach."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from moet.formats.layout import Precision
from moet.residency.cuda.waiting import U64, store, wait_for_request
from moet.residency.metrics import Phase
from moet.residency.tiers.device import Counts, Request

HOST_ENTRY = 1
"""Added to an entry of the table whose row lies in host memory; `kHostEntry` of ensure.cu."""

_U8, _U4 = np.uint64, np.uint32
_NEVER: U64 = np.zeros(1, np.uint64)


def mask_words(experts: int) -> int:
    """32-bit words of a bitmap of experts, in whole lines of 128 bytes."""
    return -(-experts // 1024) * 32


def mailbox_type(planes: int, layers: int, experts: int) -> np.dtype[np.void]:
    """`Mailbox` of ensure.cu. Lines of 128 bytes, so that no two writers share one."""
    words = mask_words(experts)
    return np.dtype(
        [
            *[(name, _U8) for name in ("begun", "done", "failures", "failed_step", "steps")],
            *[("steps_local", _U8), ("line0", _U8, 10)],
            *[("request", _U8), ("layer", _U8), ("line1", _U8, 14)],
            *[("missing", _U4, (planes, words)), ("present", _U4, (planes, words))],
            *[("rows", _U8, (planes, 2, 3)), ("line2", _U8, 16 - planes * 6 % 16)],
            ("use", _U8, (planes, layers, experts)),
        ]
    )


class Mailbox:
    """The host's side: the table and answers, which it writes, and what the device writes.

    Args:
        planes: the plane of the table and of the counts for each precision.
        shape: layers and experts. memory: uint8 [bytes_needed], pinned; cleared here.
    """

    def __init__(
        self,
        planes: Mapping[Precision, int],
        shape: tuple[int, int],
        memory: NDArray[np.uint8],
    ) -> None:
        self._shape, self._planes = shape, planes
        self._answered = self._life = 0
        self._request: Request | None = None
        memory[:] = 0
        self._bind(memory)
        self.wait(0.0, 0)  # compiles
        self.publish([], [])

    @staticmethod
    def bytes_needed(planes: int, layers: int, experts: int) -> int:
        table: int = -(-planes * layers * experts * 8 // 128) * 128
        return table + mailbox_type(planes, layers, experts).itemsize + 2 * 128

    def detach(self) -> None:
        """Goes on with a copy of the memory, which may be freed then."""
        self._bind(self._memory.copy())

    def _bind(self, memory: NDArray[np.uint8]) -> None:
        self._memory, (layers, experts) = memory, self._shape
        planes = len(self._planes)
        table_bytes = planes * layers * experts * 8
        self.table = memory[:table_bytes].view(_U8)
        self.answer = memory[-128:].view(_U8)[:2]  # and a sign of life
        kind = mailbox_type(planes, layers, experts)
        self.landed = memory[-256:].view(_U8)[:2]  # copies that have ended, by direction
        start = memory.size - 2 * 128 - kind.itemsize
        self.device_side = memory[start : start + kind.itemsize]
        fields = self.device_side.view(kind)
        self._begun, self._done = fields["begun"], fields["done"]
        self._failures, self._failed_step = fields["failures"], fields["failed_step"]
        self._steps, self._steps_local = fields["steps"], fields["steps_local"]
        self._number, self._layer = fields["request"], fields["layer"]
        self._missing, self._present = fields["missing"][0], fields["present"][0]
        self._rows, self._use = fields["rows"][0], fields["use"][0]

    def begun(self) -> int:
        return int(self._begun[0])

    def done(self) -> int:
        return int(self._done[0])

    def failures(self) -> tuple[int, int]:
        """(steps that have failed, the newest of them)."""
        return int(self._failures[0]), int(self._failed_step[0])

    def entry(self, precision: Precision, layer: int, expert: int) -> int:
        """Index of an entry in `table`."""
        layers, experts = self._shape
        index: int = (self._planes[precision] * layers + layer) * experts + expert
        return index

    def publish(self, places: Sequence[int], values: Sequence[int]) -> None:
        """table[places] = values, in this order; later reads of the device see them."""
        store(self.table, np.array(places, np.int64), np.array(values, np.uint64))

    def poll(self) -> Request | None:
        """The request that waits."""
        number = int(self._number[0])
        if number == self._answered:
            return None
        if self._request is None or self._request.number != number:
            self._request = Request(
                number, int(self._layer[0]), self._experts(self._missing),
                self._experts(self._present),
            )  # fmt: skip
        return self._request

    def reply(self, number: int) -> None:
        """Lets the step go on; it reads the entries that were missing again."""
        self._answered = number
        store(self.answer, np.zeros(1, np.int64), np.array([number], np.uint64))

    def live(self) -> None:
        """A sign of life, for a step that waits."""
        self._life += 1
        store(self.answer, np.ones(1, np.int64), np.array([self._life], np.uint64))

    def wait(self, seconds: float, seen: int, other: U64 = _NEVER, other_seen: int = 0) -> None:
        """As of `TierDevice`; ends, too, when `other`, uint64 [1], is no more `other_seen`."""
        wait_for_request(
            self._number, self._begun, self._done, seen, other, other_seen, int(seconds * 1e6)
        )

    def counts(self) -> Counts:
        """As they were when the newest finished step ended."""
        return Counts(
            steps=int(self._steps[0]),
            steps_local=int(self._steps_local[0]),
            use={p: self._use[i].astype(np.int64) for p, i in self._planes.items()},
            rows={
                (p, phase): self._rows[i, index].astype(np.int64)
                for p, i in self._planes.items()
                for index, phase in enumerate((Phase.DECODE, Phase.SCAN))
            },
        )

    def _experts(self, masks: NDArray[np.uint32]) -> dict[Precision, list[int]]:
        """By precision, of bitmaps [planes, words]."""
        bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
        return {p: np.flatnonzero(bits[plane]).tolist() for p, plane in self._planes.items()}
