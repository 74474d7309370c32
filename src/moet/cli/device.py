"""Where packing computes: `--device`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum

import torch
from rich.markup import escape

from moet.cli.ui import err
from moet.errors import ConfigError, MoetError
from moet.pack.encode import RowEncoder


class Device(StrEnum):
    """auto: the GPU where there is one."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"

    def resolve(self) -> torch.device:
        """Raises ConfigError for a GPU that is not there."""
        if self is Device.CPU or (self is Device.AUTO and not torch.cuda.is_available()):
            return torch.device("cpu")
        if not torch.cuda.is_available():
            raise ConfigError("there is no NVIDIA GPU here.", "Choose --device cpu.")
        return torch.device("cuda", torch.cuda.current_device())


@contextmanager
def row_encoder(device: Device) -> Iterator[RowEncoder | None]:
    """What makes rows of level 0 on the GPU, whose memory it gives back; None for the CPU.

    Raises a MoetError for a GPU that is asked for and cannot; `auto` then takes the CPU and says
    so.
    """
    resolved = device.resolve()
    if resolved.type == "cpu":
        yield None
        return
    from moet.pack.cuda import CudaEncoder  # needs CUDA's packages

    encoder = None
    try:
        encoder = CudaEncoder(resolved)
    except (MoetError, RuntimeError) as error:  # the latter: no memory left, a broken driver
        if device is Device.CUDA:
            raise
        err.print(f"packing on the CPU: {escape(str(error))}")
    try:
        yield encoder
    finally:
        torch.cuda.empty_cache()
