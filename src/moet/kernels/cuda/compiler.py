"""NVRTC: the CUDA sources beside this file → machine code, cached on disk."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from hashlib import blake2b
from importlib.resources import files
from pathlib import Path
from typing import Any

from moet.errors import ConfigError, MoetError


class KernelCompileError(MoetError):
    """NVRTC refused a source: a bug, or an NVRTC too old for this GPU."""


def compile_cubin(source: str, architecture: str, defines: Mapping[str, int]) -> bytes:
    """Machine code of the package's file `source` for sm_`architecture`. Needs no GPU.

    Raises ConfigError when NVRTC is not installed, KernelCompileError with its log otherwise.
    """
    text = next(p for p in _sources() if p.name == source).read_text()
    return compile_text(text, source, architecture, defines)


def compile_text(text: str, name: str, architecture: str, defines: Mapping[str, int]) -> bytes:
    """`compile_cubin` for a source given as text, which may include the package's headers."""
    nvrtc = _nvrtc()
    headers = {p.name: p.read_bytes() for p in _sources() if p.name.endswith(".cuh")}
    program = _checked(
        nvrtc.nvrtcCreateProgram(
            text.encode(), name.encode(), len(headers), list(headers.values()),
            [name.encode() for name in headers],
        )
    )  # fmt: skip
    options = [f"--gpu-architecture=sm_{architecture}", "--std=c++17", "-default-device"]
    options += [f"-D{name}={value}" for name, value in defines.items()]
    encoded = [option.encode() for option in options]
    status = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)[0]
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        log = bytearray(_checked(nvrtc.nvrtcGetProgramLogSize(program)))
        nvrtc.nvrtcGetProgramLog(program, log)
        raise KernelCompileError(f"{name} does not compile for sm_{architecture}:\n{log.decode()}")
    cubin = bytearray(_checked(nvrtc.nvrtcGetCUBINSize(program)))
    _checked(nvrtc.nvrtcGetCUBIN(program, cubin))
    nvrtc.nvrtcDestroyProgram(program)
    return bytes(cubin)


def cached_cubin(source: str, architecture: str, defines: Mapping[str, int]) -> bytes:
    """`compile_cubin` through a cache in the user's cache directory, keyed by all that it reads."""
    key = blake2b(digest_size=16)
    for part in (source, architecture, sorted(defines.items()), _checked(_nvrtc().nvrtcVersion())):
        key.update(repr(part).encode())
    for path in sorted(_sources(), key=lambda p: p.name):
        key.update(path.read_bytes())
    place = _cache_directory() / f"{Path(source).stem}-sm{architecture}-{key.hexdigest()}.cubin"
    if place.exists():
        return place.read_bytes()
    cubin = compile_cubin(source, architecture, defines)
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=place.parent, delete=False) as file:
        file.write(cubin)
    Path(file.name).replace(place)
    return cubin


def _sources() -> list[Any]:
    return [p for p in files(__package__).iterdir() if p.name.endswith((".cu", ".cuh"))]


def _cache_directory() -> Path:
    return Path.home() / ".cache" / "moet" / "kernels"


def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc
    except ImportError:
        raise ConfigError(
            "the CUDA kernels need the packages cuda-bindings and nvidia-cuda-nvrtc.",
            "Install moet with its CUDA requirements.",
        ) from None
    return nvrtc


def _checked(result: tuple[Any, ...]) -> Any:
    """A binding's (status, value...) → value; raises when the status is not success."""
    status, *values = result
    if int(status):
        raise KernelCompileError(f"NVRTC failed: {status!r}.")
    return values[0] if len(values) == 1 else tuple(values)
