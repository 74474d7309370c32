"""How much memory this process may use: the machine's, within the limits of its control groups."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


@dataclass(frozen=True)
class HostMemory:
    """Bytes. total: that this process and those beside it may use. available: of these, not used,
    or used for a page cache that can be given up."""

    total: int
    available: int


@dataclass(frozen=True)
class _Version:
    """Names of a cgroup version's files. reclaimable: keys of `memory.stat`."""

    limit: str
    usage: str
    reclaimable: tuple[str, str]


_V1 = _Version(
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)
_V2 = _Version("memory.max", "memory.current", ("inactive_file", "active_file"))


def host_memory(cgroup: Path = _CGROUP, membership: Path = _MEMBERSHIP) -> HostMemory:
    """Now. Every control group above this process counts (versions 1 and 2): the tightest wins.

    cgroup: where they are mounted. membership: the groups of this process (`cgroups(7)`).
    """
    machine = psutil.virtual_memory()
    total, available = int(machine.total), int(machine.available)
    for version, group in _groups(cgroup, membership):
        limit = _number(group / version.limit)
        if limit is None or limit >= machine.total:  # version 1 writes "none" as a huge number
            continue
        total = min(total, limit)
        usage = _number(group / version.usage)
        if usage is not None:
            used = max(0, usage - _reclaimable(group, version))
            available = min(available, max(0, limit - used))
    return HostMemory(total, min(available, total))


def _groups(cgroup: Path, membership: Path) -> Iterator[tuple[_Version, Path]]:
    """The mounted root of each memory hierarchy and the groups from there to this process.

    In a container the membership may be a path of the host's that is not mounted: the root is the
    container's own group then, and the rest does not exist.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        lines = []
    paths = {_V1: "", _V2: ""}
    for line in lines:
        if line.count(":") < 2:
            continue
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            paths[_V1] = path
        elif number == "0" and not controllers:
            paths[_V2] = path
    for version, root in ((_V1, cgroup / "memory"), (_V2, cgroup), (_V2, cgroup / "unified")):
        yield version, root
        group = root
        for part in Path(paths[version].lstrip("/")).parts:
            group /= part
            yield version, group


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _reclaimable(group: Path, version: _Version) -> int:
    """Bytes of page cache in a group's usage."""
    try:
        lines = (group / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    found = dict(line.split(" ", 1) for line in lines if " " in line)
    values = (found.get(key, "0") for key in version.reclaimable)
    return sum(int(value) for value in values if value.isdigit())
