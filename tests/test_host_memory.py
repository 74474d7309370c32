"""Memory within the limits of control groups, of both versions."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from moet.host_memory import HostMemory, host_memory

GIB = 1 << 30
LIMIT, USED = GIB // 2, GIB // 8  # this machine has more
NOTHING = HostMemory(psutil.virtual_memory().total, 0)


def group(path: Path, version: int, limit: int | str, usage: int = 0, cache: int = 0) -> None:
    path.mkdir(parents=True, exist_ok=True)
    if version == 1:
        (path / "memory.limit_in_bytes").write_text(f"{limit}\n")
        (path / "memory.usage_in_bytes").write_text(f"{usage}\n")
        stat = f"cache {cache}\ntotal_inactive_file {cache}\ntotal_active_file 0\n"
    else:
        (path / "memory.max").write_text(f"{limit}\n")
        (path / "memory.current").write_text(f"{usage}\n")
        stat = f"anon 1\ninactive_file 0\nactive_file {cache}\n"
    (path / "memory.stat").write_text(stat)


def seen(tmp_path: Path, membership: str) -> HostMemory:
    (tmp_path / "membership").write_text(membership)
    return host_memory(tmp_path / "cgroup", tmp_path / "membership")


def test_without_groups_it_is_the_machines(tmp_path: Path) -> None:
    found = seen(tmp_path, "")
    assert found.total == NOTHING.total
    assert 0 < found.available <= found.total
    assert host_memory(tmp_path / "none", tmp_path / "none").total == found.total


@pytest.mark.parametrize("version", [1, 2])
def test_a_containers_own_group_is_the_root(tmp_path: Path, version: int) -> None:
    root = tmp_path / "cgroup" / ("memory" if version == 1 else "")
    group(root, version, LIMIT, USED)
    # The path is the host's, and is not mounted in the container.
    line = "4:memory:/docker/3f5a" if version == 1 else "0::/"
    assert seen(tmp_path, f"{line}\n") == HostMemory(LIMIT, LIMIT - USED)


@pytest.mark.parametrize("version", [1, 2])
def test_the_tightest_of_the_groups_above_counts(tmp_path: Path, version: int) -> None:
    root = tmp_path / "cgroup" / ("memory" if version == 1 else "")
    group(root, version, 2**63 - 4096 if version == 1 else "max")
    group(root / "user", version, LIMIT, LIMIT - USED)
    group(root / "user" / "job", version, LIMIT // 2, 0)
    name = "4:cpu,memory:" if version == 1 else "0::"
    assert seen(tmp_path, f"9:pids:/other\n{name}/user/job\n") == HostMemory(LIMIT // 2, USED)


@pytest.mark.parametrize("version", [1, 2])
def test_page_cache_can_be_given_up(tmp_path: Path, version: int) -> None:
    root = tmp_path / "cgroup" / ("memory" if version == 1 else "")
    group(root, version, LIMIT, LIMIT, cache=USED)
    assert seen(tmp_path, "") == HostMemory(LIMIT, USED)


def test_no_limit_and_one_above_the_machines_memory(tmp_path: Path) -> None:
    group(tmp_path / "cgroup", 2, "max", USED)
    group(tmp_path / "cgroup" / "memory", 1, 2**60, USED)
    assert seen(tmp_path, "0::/\n4:memory:/\n").total == NOTHING.total


def test_files_that_make_no_sense_limit_nothing(tmp_path: Path) -> None:
    group(tmp_path / "cgroup", 2, "a lot", USED)
    assert seen(tmp_path, "nonsense\n::\n").total == NOTHING.total
