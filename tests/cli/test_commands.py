"""pack, verify and inspect through the command line: figures, JSON, help."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from moet.formats.layout import Precision
from moet.pack import Pack
from tests.cli.conftest import Ran

Moet = Callable[..., Ran]


def test_pack_then_verify_then_inspect(moet: Moet, checkpoint: Path, tmp_path: Path) -> None:
    packed = moet("pack", checkpoint, "-o", tmp_path / "small.moet", "--json")
    assert packed.code == 0, packed.err
    report = json.loads(packed.out)
    pack = Pack.open(tmp_path / "small.moet")
    assert report["digest"] == pack.digest
    assert report["layers"] == len(pack.layers)

    verified = moet("verify", tmp_path / "small.moet", "--model", checkpoint)
    assert verified.code == 0
    assert "every byte is what was packed" in verified.out

    shown = moet("inspect", tmp_path / "small.moet")
    assert shown.code == 0
    for layer in pack.layers:
        assert str(layer) in shown.out
    content = json.loads(moet("inspect", tmp_path / "small.moet", "--json").out)
    assert content["digest"] == pack.digest


def test_verify_names_the_damaged_row(moet: Moet, checkpoint: Path, tmp_path: Path) -> None:
    moet("pack", checkpoint, "-o", tmp_path / "p")
    layer = Pack.open(tmp_path / "p").layers[2]
    with layer.path.open("r+b") as file:
        place = layer.layout.row_offset(Precision.BASE, 5) + 17
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))
    verified = moet("verify", tmp_path / "p", "--json")
    assert verified.code == 1
    (problem,) = json.loads(verified.out)["problems"]
    assert (problem["layer"], problem["expert"]) == (2, 5)
    assert problem["file"].endswith("layer-00002.safetensors")
    spoken = moet("verify", tmp_path / "p")
    assert spoken.code == 1
    assert "layer-00002.safetensors" in spoken.err
    assert "expert 5" in spoken.err


def test_packing_a_bf16_checkpoint_stores_fp4_rows(moet: Moet, tmp_path: Path) -> None:
    from tests.fixtures.checkpoints import write_checkpoint

    model = write_checkpoint(tmp_path / "m", family="qwen3_moe", format="bf16")
    assert moet("pack", model, "-o", tmp_path / "p").code == 0
    assert all(layer.layout.fp4_in_pack for layer in Pack.open(tmp_path / "p").layers.values())


@pytest.mark.parametrize("command", ["pack", "verify", "inspect", "serve", "demo"])
def test_help_teaches(moet: Moet, command: str) -> None:
    shown = moet(command, "--help")
    assert shown.code == 0
    assert "Usage" in shown.out
    assert "--json" in shown.out or command == "serve"


def test_version(moet: Moet) -> None:
    assert moet("--version").out.startswith("moet ")


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The command lines that `moet serve` would become."""
    lines: list[list[str]] = []
    monkeypatch.setattr("moet.cli.serve.os.execve", lambda path, line, env: lines.append(line))
    return lines


def test_random_weights_need_no_pack(moet: Moet, tmp_path: Path, commands: list[list[str]]) -> None:
    (tmp_path / "config.json").write_text("{}")
    moet("serve", tmp_path, "--load-format", "dummy", "--port", "18999")
    (command,) = commands
    assert command[command.index("--load-format") + 1] == "dummy"
    config = json.loads(command[command.index("--additional-config") + 1])
    assert config == {"moet": {}}


def test_vllms_options_may_have_underscores(
    moet: Moet, tmp_path: Path, commands: list[list[str]]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    theirs = '{"moet": {"io_threads": 2}, "other": 1}'
    options = ["--load_format=dummy", "--additional_config", theirs, "--port", "18999"]
    moet("serve", tmp_path, "--base-pool", "25%", *options)
    (command,) = commands
    assert "--load-format=dummy" in command
    assert sum(text.startswith("--additional") for text in command) == 1
    config = json.loads(command[command.index("--additional-config") + 1])
    assert config == {"moet": {"io_threads": 2, "base_pool": "25%"}, "other": 1}


def test_a_model_is_served_without_any_option(
    moet: Moet,
    checkpoint: Path,
    tmp_path: Path,
    commands: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("moet.cli.serve._check_port", lambda arguments: None)  # 8000 may be taken
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    ran = moet("serve", checkpoint)
    assert ran.code == 0, ran.err
    assert str(checkpoint) in commands[0]
    assert list((tmp_path / ".cache" / "moet" / "packs").iterdir())
