"""A figure that is not known exactly: its low, its typical and its high value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

End = Literal["slow", "typical", "fast"]


@dataclass(frozen=True)
class Range:
    """low ≤ typical ≤ high, in the unit of whatever it is a range of."""

    low: float
    typical: float
    high: float

    def __post_init__(self) -> None:
        if not self.low <= self.typical <= self.high:
            raise ValueError(f"{self.low}, {self.typical}, {self.high} is no range")

    @classmethod
    def exactly(cls, value: float) -> Range:
        return cls(value, value, value)

    def times(self, factor: float) -> Range:
        """Every value `factor` (≥ 0) times."""
        return Range(self.low * factor, self.typical * factor, self.high * factor)

    def map(self, function: Callable[[float], float]) -> Range:
        """`function` of every value; it must be increasing."""
        return Range(function(self.low), function(self.typical), function(self.high))

    def more(self, end: End) -> float:
        """The value at an end, of an input that is faster when it is higher."""
        return {"slow": self.low, "typical": self.typical, "fast": self.high}[end]

    def less(self, end: End) -> float:
        """The value at an end, of an input that is faster when it is lower."""
        return {"slow": self.high, "typical": self.typical, "fast": self.low}[end]
