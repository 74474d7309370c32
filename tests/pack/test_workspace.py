"""Where a pack is written: one writer, resuming, what may be overwritten, and disks that say no."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moet.checkpoints import Checkpoint
from moet.errors import CheckpointError, ConfigError, MoetError, PackError
from moet.pack import PackReport, write_pack
from moet.pack.workspace import JOURNAL_NAME
from moet.quantize import QUANTIZERS
from moet.quantize.base import MatrixContext, MatrixQuantizer, TwoBitMatrix
from tests.pack.conftest import QUANTIZER, Case
from tests.pack.test_round_trip import same_files


@pytest.fixture
def checkpoint(nvfp4: Case) -> Iterator[Checkpoint]:
    with Checkpoint.open(nvfp4.checkpoint) as opened:
        yield opened


def pack(checkpoint: Checkpoint, out: Path, **settings: Any) -> PackReport:
    return write_pack(checkpoint, out, quantizer=QUANTIZERS[QUANTIZER](), **settings)


class Interrupted(MatrixQuantizer):
    """Quantizes as `QUANTIZER` does, until it comes to `layer`."""

    name, level = QUANTIZER, 0

    def __init__(self, layer: int, error: BaseException) -> None:
        self._layer, self._error = layer, error
        self._quantizer = QUANTIZERS[QUANTIZER]()

    def quantize(self, weight: Any, context: MatrixContext) -> TwoBitMatrix:
        if context.layer == self._layer and context.expert == 2:
            raise self._error
        return self._quantizer.quantize(weight, context)


def interrupt(checkpoint: Checkpoint, out: Path, layer: int = 2) -> Path:
    """Leaves an unfinished pack with the layers before `layer`; returns its directory."""
    with pytest.raises(KeyboardInterrupt):
        write_pack(checkpoint, out, quantizer=Interrupted(layer, KeyboardInterrupt()))
    assert not out.exists()
    return out.with_name(out.name + ".partial")


def test_an_interrupted_run_resumes(checkpoint: Checkpoint, nvfp4: Case, tmp_path: Path) -> None:
    partial = interrupt(checkpoint, tmp_path / "pack")
    assert {"layer-00001.safetensors", JOURNAL_NAME} < {path.name for path in partial.iterdir()}
    report = pack(checkpoint, tmp_path / "pack")
    assert (report.layers_resumed, report.layers) == (1, 2)
    assert report.checkpoint_bytes == checkpoint.expert_bytes(2) * 4
    same_files(tmp_path / "pack", nvfp4.pack)
    assert not partial.exists()


def test_an_error_in_the_checkpoint_leaves_a_resumable_pack(
    checkpoint: Checkpoint, nvfp4: Case, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match="NaN"):
        write_pack(
            checkpoint, tmp_path / "pack", quantizer=Interrupted(2, CheckpointError("a NaN"))
        )
    assert not (tmp_path / "pack").exists()
    assert pack(checkpoint, tmp_path / "pack").layers_resumed == 1
    same_files(tmp_path / "pack", nvfp4.pack)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "torn journal line": lambda partial: os.truncate(
        partial / JOURNAL_NAME, (partial / JOURNAL_NAME).stat().st_size - 9
    ),
    "empty journal": lambda partial: os.truncate(partial / JOURNAL_NAME, 0),
    "no journal": lambda partial: (partial / JOURNAL_NAME).unlink(),
    "short layer": lambda partial: os.truncate(partial / "layer-00001.safetensors", 5000),
    "no layer": lambda partial: (partial / "layer-00001.safetensors").unlink(),
    "garbage": lambda partial: (partial / "layer-00002.safetensors").write_bytes(b"garbage"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_cannot_be_used_is_written_again(
    checkpoint: Checkpoint, nvfp4: Case, tmp_path: Path, damage: str
) -> None:
    partial = interrupt(checkpoint, tmp_path / "pack")
    DAMAGE[damage](partial)
    report = pack(checkpoint, tmp_path / "pack")
    assert report.layers_resumed == (1 if damage == "garbage" else 0)
    same_files(tmp_path / "pack", nvfp4.pack)


def test_an_unfinished_pack_of_another_kind(
    checkpoint: Checkpoint, make_case: Callable[[str], Case], tmp_path: Path
) -> None:
    out = tmp_path / "pack"
    interrupt(checkpoint, out)
    with pytest.raises(PackError, match=r"format.slices is 2, not 1"):
        pack(checkpoint, out, slices=1)
    with pytest.raises(PackError, match=r"format.with_fp4 is False, not True"):
        pack(checkpoint, out, with_fp4=True)
    other = make_case("qwen-bf16")
    with Checkpoint.open(other.checkpoint) as another:
        with pytest.raises(PackError, match=r"model.source is"):
            pack(another, out)
        report = pack(another, out, slices=2, overwrite=True)
    assert report.layers_resumed == 0
    same_files(out, other.pack)


def test_one_writer(checkpoint: Checkpoint, tmp_path: Path) -> None:
    partial = interrupt(checkpoint, tmp_path / "pack")
    before = {path: path.read_bytes() for path in partial.iterdir()}
    with (partial / JOURNAL_NAME).open() as journal:
        fcntl.flock(journal, fcntl.LOCK_EX)
        for overwrite in (False, True):
            with pytest.raises(PackError, match="another process"):
                pack(checkpoint, tmp_path / "pack", overwrite=overwrite)
    assert before == {path: path.read_bytes() for path in partial.iterdir()}
    pack(checkpoint, tmp_path / "pack")


def test_a_pack_is_replaced_only_where_that_was_asked_for(
    checkpoint: Checkpoint, nvfp4: Case, make_case: Callable[[str], Case], tmp_path: Path
) -> None:
    out = shutil.copytree(make_case("qwen-bf16").pack, tmp_path / "pack")
    with pytest.raises(PackError, match="there is a pack already"):
        pack(checkpoint, out)
    same_files(out, make_case("qwen-bf16").pack)
    pack(checkpoint, out, overwrite=True)
    same_files(out, nvfp4.pack)
    assert [path.name for path in tmp_path.iterdir()] == ["pack"]


def test_what_is_not_a_pack_is_never_overwritten(checkpoint: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(PackError, match="other files"):
            pack(checkpoint, tmp_path / "home", overwrite=overwrite)
    assert (tmp_path / "home" / "thesis.tex").read_text() == "years of work"
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


def test_an_empty_directory_is_taken(checkpoint: Checkpoint, nvfp4: Case, tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    pack(checkpoint, tmp_path / "pack")
    same_files(tmp_path / "pack", nvfp4.pack)


@pytest.mark.parametrize("slices", [0, 3, 16])
def test_impossible_slices(checkpoint: Checkpoint, tmp_path: Path, slices: int) -> None:
    with pytest.raises(ConfigError, match=f"{slices} slices"):
        pack(checkpoint, tmp_path / "pack", slices=slices)
    with pytest.raises(MoetError, match="4 slices"):
        pack(checkpoint, tmp_path / "pack", slices=4)  # 64 wide: two at the most
    assert list(tmp_path.iterdir()) == []


def statvfs_with(free: int) -> Callable[[object], os.statvfs_result]:
    def statvfs(path: object) -> os.statvfs_result:
        return os.statvfs_result((1, 1, free, free, free, 1, 1, 1, 0, 255))

    return statvfs


def test_too_small_a_disk_is_found_before_the_first_byte(
    checkpoint: Checkpoint, nvfp4: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = sorted(nvfp4.pack.glob("layer-*"), key=lambda path: path.name)
    sizes = [path.stat().st_size for path in files]
    room = 2**20  # for moet.json
    with monkeypatch.context() as patch:
        patch.setattr(os, "statvfs", statvfs_with(sum(sizes) + room - 1))
        with pytest.raises(PackError, match=r"needs .*iB, but its disk has"):
            pack(checkpoint, tmp_path / "pack")
        assert not list(tmp_path.rglob("layer-*"))
    interrupt(checkpoint, tmp_path / "pack")
    with monkeypatch.context() as patch:
        # What an earlier run has written needs no room again.
        patch.setattr(os, "statvfs", statvfs_with(sizes[1] + room))
        pack(checkpoint, tmp_path / "pack")
    same_files(tmp_path / "pack", nvfp4.pack)


@pytest.mark.parametrize("limit", [1, 5000, 30_000, 60_000])
def test_a_file_size_limit_in_mid_write(
    checkpoint: Checkpoint, nvfp4: Case, tmp_path: Path, limit: int
) -> None:
    """A real refusal by the kernel: RLIMIT_FSIZE gives EFBIG."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(PackError, match=r"larger than allowed.*it resumes"):
            pack(checkpoint, tmp_path / "pack")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not (tmp_path / "pack").exists()
    pack(checkpoint, tmp_path / "pack")
    same_files(tmp_path / "pack", nvfp4.pack)


def test_a_full_disk_in_mid_write(nvfp4: Case, tmp_path: Path) -> None:
    """On a real, small file system, in a mount namespace of its own."""
    (tmp_path / "disk").mkdir()
    root = Path(__file__).parents[2]
    command = ["unshare", "--map-root-user", "--mount"]
    try:
        subprocess.run([*command, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this machine lets us have no mount namespace")
    script = [sys.executable, "-m", "tests.pack.small_disk"]
    arguments = [str(nvfp4.checkpoint), str(tmp_path / "disk"), str(nvfp4.pack)]
    run = subprocess.run(
        [*command, *script, *arguments], cwd=root, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    full, read_only, last = run.stdout.splitlines()
    assert "the disk is full" in full
    assert "it resumes" in full
    assert "cannot be written (Read-only file system)" in read_only
    assert last == "the same pack"


def test_a_place_that_cannot_be_written(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Root may write anywhere, but not below a file, nor where the kernel makes the names."""
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "pack", Path("/proc/pack")):
        with pytest.raises(PackError, match=str(out)):
            pack(checkpoint, out)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_of_somebody_else(checkpoint: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "shut").mkdir(mode=0o500)
    with pytest.raises(PackError, match=r"cannot be written \(Permission denied\)"):
        pack(checkpoint, tmp_path / "shut" / "pack")


def test_an_input_error_is_no_full_disk(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any other refusal, here EIO from fsync, is told as it is."""

    def fsync(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(PackError, match="Input/output error"):
        pack(checkpoint, tmp_path / "pack")
