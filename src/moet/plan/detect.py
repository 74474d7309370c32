"""This machine, as far as it can be seen without starting anything on the GPU."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from moet.host_memory import host_memory
from moet.plan.machine import Disk, Gpu, Machine, find_gpu, host_bandwidth, pcie
from moet.plan.measured import assumption

_QUERY = "name,memory.total,pcie.link.gen.max,pcie.link.width.max"


def detect(place: Path | None = None) -> Machine:
    """GPUs (nvidia-smi), memory (the system's and this container's limit), cores and disk.

    place: whose disk counts; default: the home directory, where packs lie.
    """
    gpus, notes = _gpus()
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return Machine(
        gpus[0] if gpus else None,
        len(gpus),
        host_memory().total,
        host_bandwidth(cores),
        cores,
        Disk(shutil.disk_usage(place or Path.home()).free, assumption("disk_gb_s").times(1e9)),
        tuple(notes),
    )


def _gpus() -> tuple[list[Gpu], list[str]]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return [], []
    try:
        run = subprocess.run(
            [program, f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"],
            capture_output=True, text=True, timeout=20, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        return [], [f"nvidia-smi did not answer ({error}), so no GPU is counted."]
    return gpus_of(run.stdout)


def gpus_of(listing: str) -> tuple[list[Gpu], list[str]]:
    """The GPUs of nvidia-smi's answer, and what was assumed of them.

    Only GPUs like the first are counted: tensor parallelism wants equal ones.
    """
    gpus: list[Gpu] = []
    notes: list[str] = []
    for line in listing.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != 4 or not fields[1].isdigit():
            continue
        name, memory = fields[0], int(fields[1]) << 20
        generation, lanes = (int(text) if re.fullmatch(r"\d+", text) else 0 for text in fields[2:])
        known = find_gpu(name)
        link = pcie(generation, lanes) if generation and lanes else pcie(4, 16)
        if known is None:
            notes.append(
                f"{name} is not in the table: 1,000 GB/s of memory bandwidth are assumed; give "
                '--gpu "MEMORY:BANDWIDTH" if you know better.'
            )
            known = Gpu(name, memory, 1e12, link, None, "pcie", None, "assumed")
        gpus.append(Gpu(known.name, memory, known.bandwidth, link, known.tflops, known.link,
                        known.sm, known.source))  # fmt: skip
    alike = [gpu for gpu in gpus if gpu.name == gpus[0].name]
    if len(alike) < len(gpus):
        notes.append(
            f"Of {len(gpus)} GPUs only those like the first, {alike[0].name}, are counted."
        )
    return alike, list(dict.fromkeys(notes))
