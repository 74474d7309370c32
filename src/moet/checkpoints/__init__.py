"""Model families, and the streaming reader of official checkpoints."""

from moet.checkpoints.base import (
    PROJECTIONS,
    ExpertWeights,
    Geometry,
    Projection,
)
from moet.checkpoints.families import family_of
from moet.checkpoints.reader import Checkpoint

__all__ = [
    "PROJECTIONS",
    "Checkpoint",
    "ExpertWeights",
    "Geometry",
    "Projection",
    "family_of",
]
