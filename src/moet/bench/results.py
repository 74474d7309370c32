"""Result files: rows that a run measured, with the machine and the command that made them."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from moet.errors import MoetError

Row = dict[str, Any]
_KEY_OPTION = "--api-key"
PACKAGES = ("moet", "vllm", "torch", "numba", "numpy", "transformers", "triton")


def environment() -> dict[str, Any]:
    """The machine and the versions, as far as they can change a figure."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": _git("rev-parse", "--short", "HEAD"),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "python": platform.python_version(),
        "versions": versions,
    }


def write_result(path: Path, rows: Sequence[Row], extra: dict[str, Any] | None = None) -> None:
    """Writes {command, environment, rows} as JSON, a row a line; `extra` joins the environment."""
    head = {
        "command": _command(),
        "environment": environment() | (extra or {}),
    }
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    body = json.dumps(head, indent=1).removesuffix("\n}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{body},\n "rows": [\n{lines}\n ]\n}}\n')


def read_result(path: Path) -> dict[str, Any]:
    """The content of a result file; raises MoetError when it is not one."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise MoetError(f"{path}: not a result file ({error}).") from None
    if not isinstance(content, dict) or not isinstance(content.get("rows"), list):
        raise MoetError(f"{path}: not a result file (no rows).")
    return content


def _command() -> str:
    """This process's command line, for a shell, without secrets."""
    program = Path(sys.argv[0])
    start = f"python {os.path.relpath(program)}"
    if program.name == "moet" or program.parts[-2:] == ("moet", "__main__.py"):
        start = "moet"
    return " ".join([start, *map(shlex.quote, _without_keys(sys.argv[1:]))])


def _without_keys(arguments: list[str]) -> Iterator[str]:
    secret = False
    for text in arguments:
        name, equals, _ = text.partition("=")
        yield "KEY" if secret else f"{name}=KEY" if equals and name == _KEY_OPTION else text
        secret = text == _KEY_OPTION


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    stripped = {key.strip(): value.strip() for key, value in fields.items()}
    name = stripped.get("model name", platform.processor())
    wide = "AVX-512" if "avx512f" in stripped.get("flags", "") else "no AVX-512"
    return f"{name}, {wide}"


def _git(*arguments: str) -> str:
    try:
        run = subprocess.run(["git", *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return run.stdout.strip()
