"""A layer's error statistics in `moet.json`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field, model_validator

from moet.checkpoints.base import PROJECTIONS
from moet.pack.strict import Strict
from moet.quantize.statistics import MatrixStatistics, merge_statistics

Count = Annotated[int, Field(ge=0, lt=2**60)]
Sum = Annotated[float, Field(ge=0)]


class ProjectionStatistics(Strict):
    """`MatrixStatistics.to_json` of one projection's matrices, of all the experts together."""

    count: Count
    zeros: Count
    negative_zeros: Count
    codes: tuple[Count, Count, Count, Count]
    squares: Sum
    magnitudes: Sum
    squared_errors: Sum
    errors: float
    scale_min: Sum | None
    scale_max: Sum | None
    relative_rms: Sum
    bias: float
    mean_error: float
    zero_fraction: Sum

    @model_validator(mode="after")
    def _derived_figures_follow(self) -> ProjectionStatistics:
        values = self.model_dump(mode="json")
        try:
            follows = self.sums().to_json() == values
        except OverflowError:
            follows = False
        if not follows:
            raise ValueError("the figures do not follow from the sums")
        return self

    def sums(self) -> MatrixStatistics:
        """The statistics as sums, which can be merged further."""
        return MatrixStatistics.from_json(self.model_dump(mode="json"))


class LayerStatistics(Strict):
    """How far the 2-bit base of a layer is from its weights, by projection."""

    gate: ProjectionStatistics
    up: ProjectionStatistics
    down: ProjectionStatistics


def layer_statistics(experts: Sequence[Sequence[MatrixStatistics]]) -> LayerStatistics:
    """Merges the statistics of gate, up and down of every expert."""
    merged = [merge_statistics(each) for each in zip(*experts, strict=True)]
    return LayerStatistics(
        **{
            projection: ProjectionStatistics(**of.to_json() | {"codes": of.codes})
            for projection, of in zip(PROJECTIONS, merged, strict=True)
        }
    )
