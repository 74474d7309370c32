"""Safetensors headers, parsed here because moet needs each tensor's absolute file offset.

Format: https://huggingface.co/docs/safetensors (8 bytes little-endian length, a JSON header, then
the tensors' bytes without holes). A checkpoint may come from a stranger: everything in a header is
checked against the file before anything uses it.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from blake3 import blake3

from moet.checkpoints.base import TensorRef
from moet.errors import CheckpointError

MAX_HEADER = 100_000_000  # the limit of the reference implementation
SAMPLE = 4096

DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip


@dataclass(frozen=True)
class Header:
    """One shard's header.

    file: the shard's name in the checkpoint. tensors: by name, in the order of their offsets.
    raw: the header's bytes. sample: data from the start, the middle and the end of the shard.
    """

    file: str
    tensors: dict[str, TensorRef]
    raw: bytes
    sample: bytes


def read_header(file: str, fd: int) -> Header:
    """Parses and checks the header of an open shard; `file` is its name, for errors and refs.

    Raises CheckpointError as `parse_header` does.
    """
    return parse_header(
        file, os.fstat(fd).st_size, lambda offset, length: os.pread(fd, length, offset)
    )


def parse_header(file: str, size: int, read: Callable[[int, int], bytes]) -> Header:
    """Parses and checks the header of a shard of `size` bytes.

    read: (offset, length) → as many bytes, or fewer where the file ends.
    Raises CheckpointError naming the file when it is truncated, is no safetensors file, or has a
    tensor whose dtype, shape, offset or size is impossible.
    """
    prefix = read(0, 8)
    length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
    if not 2 <= length <= MAX_HEADER:
        raise _damaged(file, "it does not begin with a safetensors header")
    start = 8 + length
    raw = read(8, length)
    if len(raw) != length:
        raise _damaged(file, f"its header needs {start:,} bytes, but the file has {size:,}")
    try:
        entries = json.loads(raw)
    except (ValueError, RecursionError):
        raise _damaged(file, "its header is not valid JSON") from None
    if not isinstance(entries, dict):
        raise _damaged(file, "its header is not a JSON object")
    entries.pop("__metadata__", None)

    refs = [_tensor(file, name, entry, start) for name, entry in entries.items()]
    refs.sort(key=lambda ref: (ref.offset, ref.nbytes))
    end = start
    for ref in refs:
        if ref.offset != end:
            raise _damaged(file, f"tensor {ref.name!r} overlaps another or leaves a hole")
        end += ref.nbytes
    if end != size:
        raise _damaged(file, f"its tensors end at byte {end:,}, but the file has {size:,}")
    middle = start + (end - start) // 2
    samples = [read(at, SAMPLE) for at in (start, middle, max(start, end - SAMPLE))]
    return Header(file, {ref.name: ref for ref in refs}, raw, b"".join(samples))


def identity(config: bytes, headers: Iterable[Header]) -> str:
    """The model identity, BLAKE3 in hex: config.json, all headers, a few KiB of every shard's data.

    Headers alone would not do: fine-tunes of one model have the same names, shapes and offsets.
    """
    digest = blake3()
    for header in sorted(headers, key=lambda header: header.file):
        for field in (header.file.encode(), header.raw, header.sample):
            digest.update(len(field).to_bytes(8, "little"))
            digest.update(field)
    digest.update(config)
    return digest.hexdigest()


def _tensor(file: str, name: str, entry: Any, start: int) -> TensorRef:
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        bits = DTYPE_BITS[dtype]
        # Bounds on rank and numbers keep the product below from being made expensive.
        valid = isinstance(shape, list) and len(shape) <= 16
        valid = valid and all(type(n) is int and 0 <= n < 2**60 for n in (*shape, begin, end))
    except (KeyError, TypeError, ValueError):
        valid = False
    if not valid:
        raise _damaged(file, f"the entry of tensor {name!r} is malformed")
    if end < begin or math.prod(shape) * bits != (end - begin) * 8:
        raise _damaged(file, f"tensor {name!r} has {end - begin} bytes, not {dtype} {shape}")
    return TensorRef(name, file, start + begin, end - begin, dtype, tuple(shape))


def _damaged(file: str, what: str) -> CheckpointError:
    return CheckpointError(f"{file} is damaged: {what}.", "Download this file again.")
