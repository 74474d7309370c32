"""The few calls of the CUDA driver that tiers need, without the interpreter's lock.

PyTorch has no public form of most of them, and a call that holds the interpreter while the driver
makes it wait could stop the whole process.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from moet.errors import ConfigError
from moet.kernels.cuda.launch import CudaError
from moet.units import byte_size

_OUT_OF_MEMORY = 2
_NON_BLOCKING, _DISABLE_TIMING = 1, 2
_PORTABLE_MAPPED = 1 | 2
_RELAXED = 2
_SPARE_BYTES = 64 << 20  # of GPU memory, for what the driver itself needs
_POINTER = ctypes.POINTER(c_void_p)

_CALLS = {
    "cuCtxGetCurrent": [_POINTER],
    "cuCtxPushCurrent_v2": [c_void_p],
    "cuCtxPopCurrent_v2": [_POINTER],
    "cuCtxSetCurrent": [c_void_p],
    "cuCtxSynchronize": [],
    "cuThreadExchangeStreamCaptureMode": [ctypes.POINTER(c_int)],
    "cuStreamCreate": [_POINTER, c_uint],
    "cuStreamDestroy_v2": [c_void_p],
    "cuStreamWaitEvent": [c_void_p, c_void_p, c_uint],
    "cuEventCreate": [_POINTER, c_uint],
    "cuEventDestroy_v2": [c_void_p],
    "cuEventRecord": [c_void_p, c_void_p],
    "cuMemHostAlloc": [_POINTER, c_size_t, c_uint],
    "cuMemFreeHost": [c_void_p],
    "cuMemHostRegister_v2": [c_void_p, c_size_t, c_uint],
    "cuMemHostGetDevicePointer_v2": [_POINTER, c_void_p, c_uint],
    "cuMemHostUnregister": [c_void_p],
    "cuGetErrorName": [c_int, ctypes.POINTER(c_char_p)],
}


class Driver:
    """The driver on one device, for any thread. Handles are ints.

    Raises ConfigError where memory is short, CudaError for any other refusal.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._calls: dict[str, Any] = {}
        library = ctypes.CDLL("libcuda.so.1")
        for name, types in _CALLS.items():
            call = getattr(library, name)
            call.argtypes, call.restype = types, c_int
            self._calls[name] = call
        self._start = _start_copies()
        with torch.cuda.device(device):
            torch.cuda.current_stream(device).synchronize()  # PyTorch makes its context current
            self._context = self._made("cuCtxGetCurrent")

    @contextmanager
    def current(self) -> Iterator[None]:
        """Calls inside belong to the device, and disturb no graph capture of another thread."""
        mode = c_int(_RELAXED)
        self._call("cuCtxPushCurrent_v2", self._context)
        self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        try:
            yield
        finally:
            self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
            self._made("cuCtxPopCurrent_v2")

    def adopt_thread(self) -> None:
        """As `current`, for all that the calling thread will do."""
        self._call("cuCtxSetCurrent", self._context)
        self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(c_int(_RELAXED)))

    def stream(self) -> int:
        """A new stream that does not wait for the default one."""
        with self.current():
            return self._made("cuStreamCreate", _NON_BLOCKING)

    def launching(self) -> int:
        """The stream that the calling thread launches PyTorch's kernels on."""
        return torch.cuda.current_stream(self._device).cuda_stream

    def capturing(self) -> bool:
        """Whether that stream is being captured in a CUDA graph."""
        capturing: bool = torch.cuda.is_current_stream_capturing()
        return capturing

    def event(self) -> int:
        with self.current():
            return self._made("cuEventCreate", _DISABLE_TIMING)

    def start_copies(self, copies: NDArray[np.uint64]) -> None:
        """Starts copies of any kind. Only for a thread that was adopted.

        copies: [count, 6]: target, source and size in bytes, stream; and the address of 64 bits of
        pinned memory that get a number when the copy has ended, and this number.
        """
        self._check(self._start(copies), "a copy")

    def follow(self, stream: int, other: int, event: int) -> None:
        """What comes on `stream` waits for what is on `other` now; may be captured."""
        with self.current():
            self._call("cuEventRecord", event, other)
            self._call("cuStreamWaitEvent", stream, event, 0)

    def gpu_memory(self, sizes: list[int], stream: int) -> list[Tensor]:
        """uint8 tensors from PyTorch's allocator, which counts them: to be written by `stream`
        only, and kept until their readers have ended. All or none."""
        side: Any = torch.cuda.ExternalStream(stream, self._device)  # type: ignore[no-untyped-call]
        # In the allocator's pool of that stream: other memory may still be read by kernels that
        # run, which the stream would not wait for.
        with self.current(), torch.cuda.device(self._device), torch.cuda.stream(side):
            free = torch.cuda.mem_get_info(self._device)[0]
            # Short of memory, the allocator would wait for kernels, to free what it has cached.
            if sum(sizes) + _SPARE_BYTES > free:
                raise ConfigError(
                    f"{byte_size(sum(sizes))} of GPU memory are needed and {byte_size(free)} are "
                    "free.",
                    "Make base_pool or fp4_pool smaller.",
                )
            return [torch.empty(size, dtype=torch.uint8, device=self._device) for size in sizes]

    def host_memory(self, size: int) -> int:
        """The address, for host and device, of pinned memory."""
        with self.current():
            return self._made("cuMemHostAlloc", size, _PORTABLE_MAPPED)

    def free_host_memory(self, address: int) -> None:
        """Waits for kernels that run."""
        with self.current():
            self._call("cuMemFreeHost", address)

    def pin(self, address: int, size: int) -> int:
        """Pins ordinary memory; its address for the device."""
        with self.current():
            self._call("cuMemHostRegister_v2", address, size, _PORTABLE_MAPPED)
            return self._made("cuMemHostGetDevicePointer_v2", address, 0)

    def unpin(self, address: int) -> None:
        """Waits for kernels that run."""
        with self.current():
            self._call("cuMemHostUnregister", address)

    def synchronize(self) -> None:
        with self.current():
            self._call("cuCtxSynchronize")

    def destroy(self, streams: list[int], events: list[int]) -> None:
        with self.current():
            for event in events:
                self._call("cuEventDestroy_v2", event)
            for stream in streams:
                self._call("cuStreamDestroy_v2", stream)

    def _made(self, name: str, *arguments: Any) -> int:
        """Calls what puts a handle or an address into its first argument."""
        made = c_void_p()
        self._call(name, ctypes.byref(made), *arguments)
        return made.value or 0

    def _call(self, name: str, *arguments: Any) -> None:
        self._check(self._calls[name](*arguments), name)

    def _check(self, status: int, name: str) -> None:
        if status == _OUT_OF_MEMORY:
            raise ConfigError(
                "there is not enough memory that could be pinned.",
                "Make arena smaller, or give this machine or container more memory.",
            )
        if status:
            text = c_char_p()
            self._calls["cuGetErrorName"](status, ctypes.byref(text))
            known = text.value.decode() if text.value else str(status)
            raise CudaError(f"the CUDA driver answered {known} to {name}.")


@cache
def _start_copies() -> Any:
    """The loop of `Driver.start_copies`, compiled; returns the first status that is an error."""
    library = ctypes.CDLL("libcuda.so.1")
    copy, write = library["cuMemcpyAsync"], library["cuStreamWriteValue64_v2"]
    for call, types in ((copy, [c_uint64] * 4), (write, [c_uint64] * 3 + [c_uint])):
        call.argtypes, call.restype = types, c_int

    @njit(nogil=True)  # type: ignore[untyped-decorator]
    def start(copies: NDArray[np.uint64]) -> Any:
        for i in range(len(copies)):
            line = copies[i]
            status = copy(line[0], line[1], line[2], line[3])
            if status == 0:
                status = write(line[3], line[4], line[5], 0)
            if status != 0:
                return status
        return 0

    start(np.empty((0, 6), np.uint64))  # compiles
    return start
