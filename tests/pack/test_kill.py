"""Killed at any moment, packing resumes and ends with the very bytes of an undisturbed run."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fixtures.checkpoints import write_checkpoint
from tests.pack.test_round_trip import same_files

KILLS = 20


class Packer:
    """Talks to `tests.pack.packer`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def start(
        self, model: Path, out: Path, die_at: int | None = None, overwrite: bool = False
    ) -> int:
        order = {"model": str(model), "out": str(out), "die_at": die_at, "overwrite": overwrite}
        assert self.process.stdin is not None
        print(json.dumps(order), file=self.process.stdin, flush=True)
        return int(self._line())

    def wait(self) -> tuple[int, int | None, int | None]:
        """(exit status, layers found finished, durable steps) of the child."""
        status, resumed, steps = json.loads(self._line())
        return status, resumed, steps

    def run(self, model: Path, out: Path) -> tuple[int, int | None, int | None]:
        self.start(model, out)
        return self.wait()

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(
        tmp_path_factory.mktemp("model"),
        "qwen3_moe",
        "nvfp4",
        hidden=256,
        intermediate=256,
        layers=3,
    )


@pytest.fixture(scope="module")
def packer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Packer]:
    warm_up = tmp_path_factory.mktemp("warm-up")
    write_checkpoint(warm_up / "model", "qwen3_moe", "nvfp4", layers=1)
    command = [sys.executable, "-m", "tests.pack.packer", str(warm_up)]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    ) as process:
        packer = Packer(process)
        assert packer._line() == "ready\n"
        yield packer
        assert process.stdin is not None
        process.stdin.close()


@pytest.fixture(scope="module")
def undisturbed(packer: Packer, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("undisturbed") / "pack"
    status, resumed, _ = packer.run(model, out)
    assert (status, resumed) == (0, 0)
    return out


def is_whole_or_absent(out: Path, undisturbed: Path) -> bool:
    """What others may see at any moment: no pack, or all of it. Whether it is there."""
    if not out.exists():
        return False
    same_files(out, undisturbed)
    return True


def test_killed_at_random_moments(
    packer: Packer, model: Path, undisturbed: Path, tmp_path: Path
) -> None:
    rng, killed, resumed_layers = random.Random(0), 0, 0
    begin = time.monotonic()
    packer.run(model, tmp_path / "timed")
    duration = time.monotonic() - begin
    for trial in range(20 * KILLS):
        out = tmp_path / f"pack-{trial}"
        child = packer.start(model, out)
        time.sleep(rng.uniform(0, duration))
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        status, _, _ = packer.wait()
        if status == -signal.SIGKILL and not is_whole_or_absent(out, undisturbed):
            killed += 1
            status, resumed, _ = packer.run(model, out)
            assert status == 0
            resumed_layers += resumed
            same_files(out, undisturbed)
        assert not out.with_name(out.name + ".partial").exists()
        shutil.rmtree(out)
        if killed == KILLS:
            break
    assert killed == KILLS
    assert resumed_layers > 0


def test_killed_before_every_durable_step(packer: Packer, tmp_path: Path) -> None:
    """Deterministically: in place of every write, fsync, rename and removal."""
    model = write_checkpoint(tmp_path / "model", "qwen3_moe", "nvfp4", layers=2, experts=2)
    undisturbed = tmp_path / "undisturbed"
    status, _, steps = packer.run(model, undisturbed)
    assert status == 0
    for step in range(steps):
        out = tmp_path / f"pack-{step}"
        packer.start(model, out, die_at=step)
        assert packer.wait()[0] == -signal.SIGKILL
        if not is_whole_or_absent(out, undisturbed):
            assert packer.run(model, out)[0] == 0
        same_files(out, undisturbed)
        shutil.rmtree(out)


def test_killed_while_a_pack_is_replaced(packer: Packer, tmp_path: Path) -> None:
    """The old pack stays until the new one is complete; neither is ever seen in part."""
    shape = {"family": "qwen3_moe", "format": "nvfp4", "layers": 1, "experts": 2}
    models = [write_checkpoint(tmp_path / f"model-{i}", **shape, seed=i) for i in range(2)]
    old, new, counted = (tmp_path / name for name in ("old", "new", "counted"))
    packer.run(models[0], old)
    packer.run(models[1], new)
    shutil.copytree(old, counted)
    packer.start(models[1], counted, overwrite=True)
    status, _, steps = packer.wait()
    assert status == 0
    for step in range(steps):
        out = tmp_path / f"pack-{step}"
        shutil.copytree(old, out)
        packer.start(models[1], out, die_at=step, overwrite=True)
        assert packer.wait()[0] == -signal.SIGKILL
        if out.exists():
            expected = (
                old if (out / "moet.json").read_bytes() == (old / "moet.json").read_bytes() else new
            )
            same_files(out, expected)
        packer.start(models[1], out, overwrite=True)
        assert packer.wait()[0] == 0
        same_files(out, new)
        assert not list(tmp_path.glob(f"pack-{step}.*"))
