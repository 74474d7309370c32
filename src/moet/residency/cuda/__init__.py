"""Tiers on an NVIDIA GPU: places, copies, the table that kernels read, and the steps' mailbox."""

from moet.residency.cuda.device import CudaTierDevice, LayerRows

__all__ = ["CudaTierDevice", "LayerRows"]
