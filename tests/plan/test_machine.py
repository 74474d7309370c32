"""Hardware: names, sizes, written-out GPUs, and what this machine says of itself."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from moet.errors import ConfigError
from moet.plan.detect import detect, gpus_of
from moet.plan.machine import GIB, find_gpu, known_gpus, parse_bytes, parse_disk, parse_gpus


@pytest.mark.parametrize(
    ("text", "name", "count"),
    [
        ("5090", "RTX 5090", 1),
        ("rtx5090", "RTX 5090", 1),
        ("NVIDIA GeForce RTX 5090", "RTX 5090", 1),
        ("5090x4", "RTX 5090", 4),
        ("RTX PRO 6000×2", "RTX PRO 6000", 2),
        ("4× RTX PRO 6000", "RTX PRO 6000", 4),
        ("2 x H200", "H200", 2),
        ("h200*8", "H200", 8),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000", 1),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada", 1),
        ("A6000", "RTX A6000", 1),
        ("NVIDIA H100 80GB HBM3", "H100", 1),
        ("NVIDIA H100 PCIe", "H100 PCIe", 1),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB", 1),
        ("A100-SXM4-40GB", "A100 40GB", 1),
        ("L4", "L4", 1),
        ("L40S", "L40S", 1),
    ],
)
def test_names(text: str, name: str, count: int) -> None:
    gpu, n = parse_gpus(text)
    assert (gpu.name, n) == (name, count)


@pytest.mark.parametrize("name", known_gpus())
def test_every_product_answers_to_its_own_name(name: str) -> None:
    gpu, count = parse_gpus(f"{name}×3")
    assert (gpu.name, count) == (name, 3)
    assert gpu.source
    assert 100e9 < gpu.bandwidth < 1e13
    assert gpu.h2d.high < gpu.bandwidth


def test_written_out() -> None:
    gpu, count = parse_gpus("24GiB:1000GB/s×2")
    assert (gpu.memory, gpu.bandwidth, count) == (24 * GIB, 1e12, 2)
    gpu, _ = parse_gpus("80GB:2TB/s:50GB/s")
    assert (gpu.memory, gpu.bandwidth, gpu.h2d.low) == (80 * 10**9, 2e12, 50e9)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("RTX 5091", "Did you mean 'RTX 5090'"),
        ("Voodoo 2", "Known: RTX 3090"),
        ("5090x0", "n ≥ 1"),
        ("24GiB:fast", "is not a bandwidth"),
        ("24GiB:0GB/s", "is not a bandwidth"),
        ("much:1TB/s", "is not a size"),
        ("1GiB:1GB/s:1GB/s:1GB/s", "three fields"),
    ],
)
def test_what_is_no_gpu_is_refused(text: str, part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        parse_gpus(text)


def test_an_rtx_6000_of_another_generation_is_not_guessed() -> None:
    assert find_gpu("NVIDIA Quadro RTX 6000") is None


def test_sizes_and_disks() -> None:
    assert parse_bytes("64", "--ram") == parse_bytes("64GiB", "--ram") == 64 * GIB
    assert parse_bytes("0.5TB", "--ram") == 5 * 10**11
    disk = parse_disk("2TB:7GB/s")
    assert (disk.free, disk.bandwidth.low, disk.bandwidth.high) == (2 * 10**12, 7e9, 7e9)
    assert parse_disk("3GB/s").free is None
    with pytest.raises(ConfigError, match="--ram '64 parsecs'"):
        parse_bytes("64 parsecs", "--ram")


def test_gpus_of_this_machine() -> None:
    listing = "NVIDIA GeForce RTX 4090, 24564, 4, 16\nNVIDIA GeForce RTX 4090, 24564, 4, 8\n"
    gpus, notes = gpus_of(listing + "NVIDIA L4, 23034, 4, 8\n")
    assert [gpu.name for gpu in gpus] == ["RTX 4090", "RTX 4090"]
    assert gpus[0].h2d.typical == pytest.approx(2 * gpus[1].h2d.typical)
    assert "only those like the first" in " ".join(notes)
    unknown, notes = gpus_of("NVIDIA Z9, 49140, [N/A], [N/A]\n")
    assert (unknown[0].memory, unknown[0].tflops) == (49140 << 20, None)
    assert "Z9 is not in the table" in notes[0]
    assert gpus_of("garbage\n") == ([], [])


def test_detect_sees_this_machine(tmp_path: Path) -> None:
    here = detect(tmp_path)
    assert 0 < here.ram <= psutil.virtual_memory().total
    assert here.cores >= 1
    assert (here.gpu is None) == (here.count == 0)
    assert here.disk.free
