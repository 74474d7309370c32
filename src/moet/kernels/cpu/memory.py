"""Raw memory and threads from inside numba functions."""

from __future__ import annotations

import ctypes
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_POINTER = ir.IntType(8).as_pointer()
_I32, _I64 = ir.IntType(32), ir.IntType(64)


def parallel_region() -> int:
    """Address of `GOMP_parallel` in the OpenMP runtime that torch uses in this process, or 0.

    Sharing torch's thread team means its thread count and core binding hold for us too, and no
    second team competes for the cores. libgomp has the function, and LLVM's and Intel's libomp
    offer it under the same name; torch's own import makes the runtime's symbols global, and a
    preloaded runtime is found first, as it is by torch.
    """
    try:
        function = ctypes.CDLL(None).GOMP_parallel
    except AttributeError:  # a torch with another runtime (macOS): work runs on the calling thread
        return 0
    return ctypes.cast(function, ctypes.c_void_p).value or 0


@intrinsic  # type: ignore[untyped-decorator]
def pointer(typing: Any, address: Any) -> Any:
    """int64 address → void pointer, for `carray`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], _POINTER)

    return types.voidptr(types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def fetch_add(typing: Any, address: Any) -> Any:
    """Adds 1 to the int64 at `address` atomically; returns what it was."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        target = builder.inttoptr(args[0], _I64.as_pointer())
        return builder.atomic_rmw("add", target, ir.Constant(_I64, 1), "monotonic")

    return types.int64(types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def call(typing: Any, function: Any, arguments: Any) -> Any:
    """Calls the C function `void (*)(int64_t, …)` at an address, with a tuple of arguments."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values = [builder.extract_value(args[1], i) for i in range(len(arguments))]
        kind = ir.FunctionType(ir.VoidType(), [_I64] * len(values))
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), values)
        return context.get_dummy_value()

    return types.void(types.int64, types.UniTuple(types.int64, len(arguments))), codegen


@intrinsic  # type: ignore[untyped-decorator]
def call_parallel(typing: Any, region: Any, function: Any, argument: Any, threads: Any) -> Any:
    """`GOMP_parallel(function, argument, threads, 0)`: every thread of a team calls `function`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_POINTER, _POINTER, _I32, _I32])
        target = builder.inttoptr(args[0], kind.as_pointer())
        function, argument = (builder.inttoptr(a, _POINTER) for a in args[1:3])
        threads = builder.trunc(args[3], _I32)
        builder.call(target, [function, argument, threads, ir.Constant(_I32, 0)])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen
