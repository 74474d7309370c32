"""The command as a user runs it, in-process where that is the same and quick."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from moet.cli import ui
from moet.cli.main import main
from tests.fixtures.checkpoints import write_checkpoint


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str


@pytest.fixture
def moet(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """Runs `moet ARGUMENTS` and returns its exit code and what it printed."""

    def run(*arguments: object) -> Ran:
        out, err = io.StringIO(), io.StringIO()
        monkeypatch.setattr(sys, "argv", ["moet", *map(str, arguments)])
        monkeypatch.setattr(ui.err, "_file", err)  # `file` would be put back as what it stood for
        monkeypatch.setattr(ui.out, "_file", out)
        code = 0
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                main()
            except SystemExit as stop:
                code = stop.code if isinstance(stop.code, int) else 1
        return Ran(code, out.getvalue(), err.getvalue())

    return run


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small NVFP4 checkpoint in the official form."""
    return write_checkpoint(tmp_path_factory.mktemp("models") / "small", format="nvfp4")
