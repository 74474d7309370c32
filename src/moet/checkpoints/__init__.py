"""Model families, and the streaming reader of official checkpoints."""

from moet.checkpoints.base import (
    FAMILIES,
    PROJECTIONS,
    ExpertSource,
    ExpertWeights,
    Family,
    Geometry,
    MatrixSource,
    Projection,
    TensorRef,
)
from moet.checkpoints.families import family_of
from moet.checkpoints.reader import Checkpoint

__all__ = [
    "FAMILIES",
    "PROJECTIONS",
    "Checkpoint",
    "ExpertSource",
    "ExpertWeights",
    "Family",
    "Geometry",
    "MatrixSource",
    "Projection",
    "TensorRef",
    "family_of",
]
