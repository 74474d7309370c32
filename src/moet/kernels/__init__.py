"""Routed experts of a layer, computed from packed rows.

Importing this package registers the operators in `OPERATORS`; it compiles none.
"""

from typing import Any

from moet.kernels.base import OPERATORS, ExpertRows, ExpertsOperator, SwiGLU
from moet.kernels.cpu import CpuExperts
from moet.kernels.cuda_operator import CudaExpertsOperator
from moet.kernels.reference import ReferenceExperts

__all__ = [
    "OPERATORS",
    "CpuExperts",
    "CudaExpertsOperator",
    "ExpertRows",
    "ExpertsOperator",
    "ReferenceExperts",
    "SwiGLU",
    "make_operator",
]


def make_operator(name: str, **options: Any) -> ExpertsOperator:
    """The operator registered under `name`, made with its own options (cpu: `threads`).

    Raises ConfigError when there is none of that name.
    """
    return OPERATORS[name](**options)
