"""`moet calibrate` with what cannot work: said before any engine starts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from moet.cli.main import app
from moet.errors import MoetError
from tests.fixtures.checkpoints import write_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model") / "m")


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokens") / "t.npy"
    np.save(path, np.arange(200) % 250)
    return path


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "one of --tokens and --text must be given"),
        (["--tokens", "TOKENS", "--text", "TOKENS"], "one of --tokens and --text"),
        (["--tokens", "TOKENS", "--window", "300"], "has 200 tokens; a window takes 300"),
        (["--tokens", "TOKENS", "--window", "50", "--budget", "1KB"], "less than a window of 50"),
        (["--tokens", "TOKENS", "--budget", "much"], "--budget 'much' is not a size"),
        (["--tokens", "TOKENS", "--budget", "auto"], "--budget 'auto' is impossible"),
        (["--tokens", "TOKENS", "--engine", "dtype"], "--engine is not JSON"),
        (["--tokens", "TOKENS", "--engine", "[1]"], "--engine must be a JSON object"),
        (["--tokens", "TOKENS", "--set", "pol=lru"], "unknown setting 'pol'"),
        (["--tokens", "none.bin"], "none.bin: cannot be read as tokens"),
    ],
)
def test_what_cannot_work(
    options: list[str], message: str, model: Path, tokens: Path, tmp_path: Path
) -> None:
    given = [str(tokens) if text == "TOKENS" else text for text in options]
    command = ["calibrate", str(model), "-o", str(tmp_path / "c"), *given]
    with pytest.raises(MoetError) as caught:
        CliRunner().invoke(app, command, catch_exceptions=False)
    assert message in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_experts_with_biases(tokens: Path, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "gpt", "gpt_oss", "mxfp4")
    command = ["calibrate", str(model), "-o", str(tmp_path / "c"), "--tokens", str(tokens)]
    with pytest.raises(MoetError, match="calibration does not know experts with biases"):
        CliRunner().invoke(app, command, catch_exceptions=False)
