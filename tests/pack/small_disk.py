"""Run in a mount namespace: packs onto a file system that is too small, read-only, then neither.

Arguments: the checkpoint, an empty directory to mount on, the pack that is to come out. Prints the
two errors, and whether the pack is the same in the end.
"""

from __future__ import annotations

import filecmp
import os
import subprocess
import sys
from pathlib import Path

from moet.checkpoints import Checkpoint
from moet.errors import PackError
from moet.pack import write_pack
from moet.quantize import QUANTIZERS


def mount(options: str, directory: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(directory)], check=True)


def try_to_pack(checkpoint: Checkpoint, out: Path) -> None:
    try:
        write_pack(checkpoint, out, quantizer=QUANTIZERS["data-free"]())
    except PackError as error:
        print(error)


def main(model: Path, directory: Path, expected: Path) -> None:
    mount("size=64k", directory)
    out = directory / "pack"
    with Checkpoint.open(model) as checkpoint:
        honest = os.statvfs
        # A disk that fills up after the check, because others write to it too.
        os.statvfs = lambda path: honest("/")  # type: ignore[assignment]
        try_to_pack(checkpoint, out)
        mount("remount,ro,size=4m", directory)
        try_to_pack(checkpoint, out)
        mount("remount,rw,size=4m", directory)
        write_pack(checkpoint, out, quantizer=QUANTIZERS["data-free"]())
    names = [path.name for path in expected.iterdir()]
    same = filecmp.cmpfiles(out, expected, names, shallow=False)[0]
    print("the same pack" if sorted(same) == sorted(names) else "another pack")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
