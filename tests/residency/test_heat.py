"""Heat decays by steps, and its file survives kills, damage and strangers."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from random import Random

import numpy as np
import pytest

from moet.residency.heat import Heat, load_heat, save_heat

LAYERS = (3, 4, 9)
COUNTS = np.random.default_rng(1).random((3, 16), np.float32)


def load(path: Path) -> np.ndarray | None:
    return load_heat(path, "pack", LAYERS, 16)


def test_counts_decay_with_the_steps() -> None:
    heat = Heat(np.array([[0.0, 8.0]]), half_life=10)
    heat.touch(0, np.array([0, 1]), 0)
    np.testing.assert_allclose(heat.counts(0), [[1, 9]])
    heat.touch(0, np.array([0]), 10)
    np.testing.assert_allclose(heat.counts(10), [[1.5, 4.5]])
    np.testing.assert_allclose(heat.counts(30), [[0.375, 1.125]])
    assert heat.decode_steps == 2


def test_a_million_steps_neither_overflow_nor_flatten() -> None:
    heat = Heat(np.zeros((1, 2)), half_life=100)
    for step in range(10**6, 10**6 + 1000):
        heat.touch(0, np.array([0] if step % 4 else [0, 1]), step)
    counts = heat.counts(10**6 + 1000)
    assert np.isfinite(counts).all()
    assert counts[0, 0] / counts[0, 1] == pytest.approx(4, rel=0.05)


def test_a_file_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "heat"
    assert load(path) is None
    save_heat(path, "pack", LAYERS, COUNTS)
    loaded = load(path)
    assert loaded is not None
    np.testing.assert_array_equal(loaded, COUNTS)
    assert os.listdir(tmp_path) == ["heat"]


@pytest.mark.parametrize(
    ("identity", "layers", "experts", "words"),
    [
        ("another", LAYERS, 16, "another pack"),
        ("pack", (3, 4, 8), 16, "other layers"),
        ("pack", (3, 4), 16, "other layers"),
        ("pack", LAYERS, 12, "other layers"),
    ],
)
def test_a_foreign_file_is_ignored_with_a_warning(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    identity: str,
    layers: tuple[int, ...],
    experts: int,
    words: str,
) -> None:
    path = tmp_path / "heat"
    save_heat(path, "pack", LAYERS, COUNTS)
    assert load_heat(path, identity, layers, experts) is None
    assert words in caplog.text
    assert str(path) in caplog.text


def test_a_damaged_file_is_never_taken_for_heat(tmp_path: Path) -> None:
    path = tmp_path / "heat"
    save_heat(path, "pack", LAYERS, COUNTS)
    good = path.read_bytes()
    rng = Random(0)
    for position in range(len(good)):
        damaged = bytearray(good)
        damaged[position] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        loaded = load(path)
        assert loaded is None or np.array_equal(loaded, COUNTS), position
    for size in range(0, len(good), 7):
        path.write_bytes(good[:size])
        assert load(path) is None
    path.write_bytes(good + b"\0")
    assert load(path) is None
    path.unlink()
    path.mkdir()
    assert load(path) is None


def test_a_kill_leaves_the_old_file_or_the_new(tmp_path: Path) -> None:
    path = tmp_path / "heat"
    shape, rng = (3, 4096), Random(0)
    for _ in range(40):
        running, ready = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                for version in range(10**6):
                    save_heat(path, "pack", LAYERS, np.full(shape, version % 997, np.float32))
                    if version == 0:
                        os.write(ready, b"1")
            finally:
                os._exit(1)
        os.close(ready)
        assert os.read(running, 1) == b"1"
        time.sleep(rng.random() * 0.01)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(running)
        counts = load_heat(path, "pack", LAYERS, 4096)
        assert counts is not None
        assert (counts == counts[0, 0]).all()
        assert set(os.listdir(tmp_path)) <= {"heat", "heat.tmp"}
    save_heat(path, "pack", LAYERS, COUNTS)
    assert os.listdir(tmp_path) == ["heat"]
