"""The CUDA kernels behind the operators' host interface, for tests and tools.

A model's forward pass uses `CudaExperts.forward` instead: there the tables live on the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moet.errors import ConfigError
from moet.kernels.base import OPERATORS, ExpertRows, ExpertsOperator, SwiGLU
from moet.kernels.cuda.experts import CudaExperts
from moet.kernels.cuda.shape import PRECISION_CODES, ExpertsShape

_EXPERTS_STEP = 128  # kernels are compiled for a multiple of this many experts


@OPERATORS.register("cuda")
class CudaExpertsOperator(ExpertsOperator):
    """Routed experts on an NVIDIA GPU; rows in GPU memory or in pinned host memory."""

    name = "cuda"

    def __init__(self) -> None:
        self._kernels: dict[tuple[ExpertsShape, torch.device], CudaExperts] = {}

    def accumulate(
        self,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        rows: ExpertRows,
        activation: SwiGLU,
        out: Tensor,
    ) -> None:
        """See the base class; tensors are on one CUDA device, and x is rounded to bfloat16.

        Raises ConfigError for tensors that are not on a CUDA device.
        """
        if not x.is_cuda:
            raise ConfigError(
                f"the cuda operator needs tensors on a GPU, not on {x.device}.",
                "Use the cpu operator there.",
            )
        experts = int(rows.experts.max(initial=-1)) // _EXPERTS_STEP * _EXPERTS_STEP + _EXPERTS_STEP
        shape = ExpertsShape.of(rows.layouts, experts, topk_ids.shape[1])
        kernels = self._kernels.get((shape, x.device))
        if kernels is None:
            kernels = self._kernels[shape, x.device] = CudaExperts(shape, x.device)
        address = torch.zeros(experts, dtype=torch.int64)
        precision = torch.zeros(experts, dtype=torch.uint8)
        factor = torch.zeros(experts, 3)
        address[rows.experts] = torch.from_numpy(rows.address)
        precision[rows.experts] = torch.tensor(
            [PRECISION_CODES[p] for p in rows.precision], dtype=torch.uint8
        )
        factor[rows.experts] = torch.from_numpy(rows.factor)
        kernels.forward(
            x.to(torch.bfloat16).contiguous(), topk_ids.contiguous(), topk_weights.contiguous(),
            address.to(x.device), precision.to(x.device), factor.to(x.device), activation, out,
            accumulate=True,
        )  # fmt: skip
