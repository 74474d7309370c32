"""Sets up .venv for this checkout: `make setup` (which `make demo` and `make test` run first).

Standard library only, since nothing is installed yet. A machine with an NVIDIA GPU gets vLLM's CUDA
build, any other the CPU build. A second run finds its own stamp and does nothing.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / ".moet-ready"
CPU_LOCK = ROOT / "requirements" / "cpu.lock"
CUDA_LIST = ROOT / "requirements" / "cuda.txt"
TORCH_CPU = "torch==2.13.0+cpu"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
VLLM_CPU_VERSION = "0.32.0+cpu"


def main() -> int:
    if sys.version_info < (3, 11):  # noqa: UP036 - run by whatever Python there is
        print(f"moet needs Python 3.11 or newer; this is {sys.version.split()[0]}.")
        return 1
    gpu = has_gpu()
    stamp = f"{'cuda' if gpu else 'cpu'} {fingerprint()}"
    if STAMP.exists() and STAMP.read_text() == stamp:
        return 0
    steps = cuda_steps() if gpu else cpu_steps()
    if not PYTHON.exists():
        steps.insert(0, ("a virtual environment in .venv", make_venv))
    for number, (what, step) in enumerate(steps, 1):
        print(f"[{number}/{len(steps)}] {what}", flush=True)
        began = time.monotonic()
        try:
            step()
        except subprocess.CalledProcessError as error:
            print(
                f"set-up stopped at step {number}: pip exited with {error.returncode} (see above)."
            )
            return 1
        print(f"      {time.monotonic() - began:.0f} s", flush=True)
    STAMP.write_text(stamp)
    return 0


def has_gpu() -> bool:
    tool = shutil.which("nvidia-smi")
    return bool(tool) and subprocess.run([tool, "-L"], capture_output=True).returncode == 0


def fingerprint() -> str:
    digest = hashlib.sha256()
    for path in (CPU_LOCK, CUDA_LIST, ROOT / "pyproject.toml", Path(__file__)):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def make_venv() -> None:
    venv.create(VENV, with_pip=True)


def pip(*arguments: str) -> None:
    """`pip install`, its many lines shown as a counter; all of them if it fails."""
    command = [str(PYTHON), "-m", "pip", "install", "--disable-pip-version-check", *arguments]
    lines, collected = [], 0
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as run:
        for line in run.stdout or ():
            lines.append(line)
            if line.startswith("Collecting "):
                collected += 1
                show(f"{collected}: {line.split()[1]}")
            elif line.startswith("Installing collected packages"):
                show("installing")
    show("")
    if run.returncode:
        print("".join(lines))
        raise subprocess.CalledProcessError(run.returncode, command)


def show(text: str) -> None:
    """A line that the next one overwrites; nothing where no one watches."""
    if sys.stdout.isatty():
        print(f"\r      {text:<60.60}", end="\n" if not text else "", flush=True)


Step = tuple[str, Callable[[], None]]


def cpu_steps() -> list[Step]:
    count = sum(1 for line in CPU_LOCK.read_text().splitlines() if "==" in line)
    return [
        ("torch 2.13, CPU build", install_torch_cpu),
        (
            f"vLLM 0.32, CPU build, and what it needs: {count} pinned packages",
            lambda: pip("--no-deps", "-r", str(CPU_LOCK)),
        ),
        ("the name under which vLLM looks itself up", name_vllm),
        ("moet", lambda: pip("--no-deps", "--no-build-isolation", "-e", ".")),
    ]


def cuda_steps() -> list[Step]:
    return [
        (
            "vLLM 0.32, CUDA build, and moet, with what they need",
            lambda: pip("-r", str(CUDA_LIST), "-e", ".[cuda,plot,dev]"),
        ),
    ]


def install_torch_cpu() -> None:
    """From the machine's own package sources if they have it, else from PyTorch's index.

    PyPI's torch for x86-64 Linux is the CUDA build (several GB), hence the local version.
    """
    probe = [str(PYTHON), "-m", "pip", "download", "-q", "--no-deps", "--dest", str(VENV / "torch")]
    found = subprocess.run([*probe, TORCH_CPU], capture_output=True).returncode == 0
    source = (
        ["--find-links", str(VENV / "torch")] if found else ["--extra-index-url", TORCH_CPU_INDEX]
    )
    pip(*source, TORCH_CPU)
    shutil.rmtree(VENV / "torch", ignore_errors=True)


def name_vllm() -> None:
    """vLLM asks for the version of "vllm", but its CPU wheel is called "vllm-cpu"."""
    (site,) = VENV.glob("lib/python3*/site-packages")
    info = site / f"vllm-{VLLM_CPU_VERSION}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM_CPU_VERSION}\n"
        "Summary: another name for vllm-cpu, made by moet's set-up\n"
    )
    (info / "INSTALLER").write_text("moet-setup\n")
    (info / "RECORD").write_text("")


if __name__ == "__main__":
    sys.exit(main())
