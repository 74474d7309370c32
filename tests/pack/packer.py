"""A process that packs in forked children, so that many can be killed without paying for imports.

Reads one JSON object a line: {"model", "out", "die_at", "overwrite"}. A forked child packs `model`
into `out`; with `die_at` it kills itself, by SIGKILL, in place of its n-th call that makes a thing
durable or visible. Answers with the child's pid and, when it has ended, its exit status, the number
of layers that it found finished, and how many such calls it made.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from moet.checkpoints import Checkpoint
from moet.pack import write_pack
from moet.quantize import QUANTIZERS

STEPS = ("fsync", "replace", "rename", "unlink", "rmdir", "mkdir", "ftruncate", "pwrite")


def pack(model: str, out: str, die_at: int | None, overwrite: bool) -> tuple[int, int]:
    """(layers found finished, durable steps made)."""
    steps, counting = 0, threading.Lock()

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def step(*arguments: Any, **options: Any) -> Any:
            nonlocal steps
            with counting:  # a layer is finished while the next one is begun
                if steps == die_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                steps += 1
            return call(*arguments, **options)

        return step

    for name in STEPS:
        setattr(os, name, counted(getattr(os, name)))
    with Checkpoint.open(model) as checkpoint:
        report = write_pack(
            checkpoint,
            out,
            quantizer=QUANTIZERS["data-free"](),
            workers=1,
            overwrite=overwrite,
        )
    return report.layers_resumed, steps


def main() -> None:
    torch.set_num_threads(1)  # a forked child of a process with OpenMP threads can hang
    warm_up = Path(sys.argv[1])
    with Checkpoint.open(warm_up / "model") as checkpoint:
        write_pack(checkpoint, warm_up / "pack", quantizer=QUANTIZERS["data-free"]())
    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                result = pack(**order)
                os.write(writer, json.dumps(result).encode())
                os._exit(0)
            except BaseException as error:
                print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
                os._exit(1)
        os.close(writer)
        print(child, flush=True)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        resumed, steps = json.loads(os.read(reader, 100) or b"[null, null]")
        os.close(reader)
        print(json.dumps([status, resumed, steps]), flush=True)


if __name__ == "__main__":
    main()
