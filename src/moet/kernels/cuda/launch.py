"""A compiled kernel on the current device, launched on a stream by its raw handles."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from moet.errors import MoetError


class CudaError(MoetError):
    """The CUDA driver refused a call."""


class Kernel:
    """One entry point of a cubin.

    Args:
        cubin: machine code for this device.
        name: the entry point.
        shared_bytes: dynamic shared memory of a block.
    """

    def __init__(self, cubin: bytes, name: str, shared_bytes: int = 0) -> None:
        from cuda.bindings import driver

        torch.empty(1, device="cuda")  # PyTorch makes its context current at the first use
        self._driver = driver
        self._module = _checked(driver.cuModuleLoadData(cubin))
        self._function = _checked(driver.cuModuleGetFunction(self._module, name.encode()))
        self.reserve_shared(shared_bytes)

    @property
    def static_shared(self) -> int:
        """Bytes of shared memory that the kernel takes without the dynamic part."""
        attribute = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
        return int(_checked(self._driver.cuFuncGetAttribute(attribute, self._function)))

    def reserve_shared(self, size: int) -> None:
        """Sets the dynamic shared memory of a block, in bytes."""
        self._shared_bytes = size
        name = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _checked(self._driver.cuFuncSetAttribute(self._function, name, size))

    def launch(
        self,
        grid: tuple[int, int],
        threads: int,
        stream: int,
        arguments: list[Tensor | int | float],
        cooperative: bool = False,
    ) -> None:
        """Tensors go as their addresses, ints as int32, floats as float32."""
        driver = self._driver
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = *grid, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = self._shared_bytes
        config.hStream = stream
        if cooperative:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
            attribute.value.cooperative = 1
            config.numAttrs, config.attrs = 1, [attribute]
        values = tuple(a.data_ptr() if isinstance(a, Tensor) else a for a in arguments)
        types = tuple(_TYPES[type(a)] if not isinstance(a, Tensor) else ctypes.c_void_p
                      for a in arguments)  # fmt: skip
        _checked(driver.cuLaunchKernelEx(config, self._function, (values, types), 0))


_TYPES: dict[type, Any] = {int: ctypes.c_int, float: ctypes.c_float}


def _checked(result: tuple[Any, ...]) -> Any:
    status, *values = result
    if int(status):
        raise CudaError(f"the CUDA driver answered {status!r}.")
    return values[0] if len(values) == 1 else None
