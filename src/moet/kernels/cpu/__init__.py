"""Experts on the CPU: packed codes are decoded in registers, tile by tile."""

from moet.kernels.cpu.operator import CpuExperts

__all__ = ["CpuExperts"]
