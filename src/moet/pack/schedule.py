"""The order of packing: the checkpoint's files one after another, each of them once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from moet.checkpoints.base import TensorRef
from moet.checkpoints.reader import Checkpoint


@dataclass(frozen=True)
class Step:
    """What is done while one file of the checkpoint is at hand.

    file: its name. experts: (layer, expert), those whose last bytes it holds, in the order of their
    first bytes. keep: the parts in it of experts that later files complete. drop: earlier files of
    which this step reads the last parts that were kept.
    """

    file: str
    experts: tuple[tuple[int, int], ...]
    keep: tuple[TensorRef, ...]
    drop: tuple[str, ...]


def schedule(checkpoint: Checkpoint, layers: Iterable[int]) -> list[Step]:
    """The steps that read every expert of `layers`, files in ascending order."""
    complete: dict[str, list[tuple[tuple[str, int], int, int]]] = {}
    kept: dict[str, dict[tuple[str, int], TensorRef]] = {}
    last_use: dict[str, str] = {}
    for layer in layers:
        for expert in range(checkpoint.geometry.num_experts):
            refs = [
                ref for parts in checkpoint.locate(layer, expert).values() for ref in parts.values()
            ]
            end = max(ref.file for ref in refs)
            first = min((ref.file, ref.offset) for ref in refs)
            complete.setdefault(end, []).append((first, layer, expert))
            for ref in refs:
                if ref.file != end:
                    kept.setdefault(ref.file, {})[ref.file, ref.offset] = ref
                    last_use[ref.file] = max(end, last_use.get(ref.file, ""))
    return [
        Step(
            file,
            tuple((layer, expert) for _, layer, expert in sorted(complete.get(file, []))),
            tuple(kept.get(file, {}).values()),
            tuple(sorted(old for old, end in last_use.items() if end == file)),
        )
        for file in sorted(complete.keys() | kept.keys())
    ]
