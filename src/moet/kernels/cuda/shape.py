"""What the kernels are compiled for, and the values of the device tables they read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moet.errors import UnsupportedError
from moet.formats.layout import Precision, RowLayout

PRECISION_CODES = {Precision.BASE: 0, Precision.MXFP4: 1, Precision.NVFP4: 2}
"""Values of the precision table; `enum Precision` of weights.cuh."""

REMOTE = 0x80
"""Added to a precision where the row lies in host memory: its work is spread differently, its
result is the same."""


@dataclass(frozen=True)
class ExpertsShape:
    """A layer's geometry on one rank.

    slices: of the rank's rows. precisions: those that there are rows of. gpt_oss: whether gate and
    up have biases and the activation is gpt-oss's.
    """

    hidden: int
    intermediate: int
    slices: int
    num_experts: int
    top_k: int
    precisions: frozenset[Precision] = frozenset(PRECISION_CODES)
    gpt_oss: bool = False

    @classmethod
    def of(
        cls,
        layouts: Mapping[Precision, RowLayout],
        num_experts: int,
        top_k: int,
        gpt_oss: bool = False,
    ) -> ExpertsShape:
        """The shape that all layouts agree on; raises UnsupportedError when they do not."""
        shapes = {(v.hidden, v.intermediate, v.slices) for v in layouts.values()}
        if len(shapes) != 1:
            raise UnsupportedError(f"the rows of a layer differ in geometry: {sorted(shapes)}.")
        return cls(*shapes.pop(), num_experts, top_k, frozenset(layouts), gpt_oss)

    def defines(self) -> dict[str, int]:
        """The compile-time constants of the sources."""
        sizes = {
            "HIDDEN": self.hidden, "INTER": self.intermediate, "SLICES": self.slices,
            "EXPERTS": self.num_experts, "TOPK": self.top_k,
        }  # fmt: skip
        return sizes | ({"GPT_OSS": 1} if self.gpt_oss else {})

    @property
    def precision_bits(self) -> int:
        """`precisions`, a bit for each code."""
        return sum(1 << PRECISION_CODES[precision] for precision in self.precisions)
