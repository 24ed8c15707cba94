"""Return the free memory of this host: the kernel's estimate, or less if a cgroup limits this process."""

from __future__ import annotations

from pathlib import Path

import psutil

_LIMITS = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
"""Names of a cgroup's files with memory limit and usage, for version 2 and version 1."""
_CACHE = ("inactive_file", "total_inactive_file")
"""Fields of ``memory.stat`` with the bytes of page cache that the kernel reclaims before the limit applies."""


def free_host_bytes(cgroups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Return the number of bytes of host memory that new processes can allocate.

    ``cgroups``: mount point of the cgroups. ``own``: the file that names this process's cgroups.
    """
    left = [psutil.virtual_memory().available]
    for folder in _own_cgroups(cgroups, own):
        for limit_file, usage_file in _LIMITS:
            limit, usage = _number(folder / limit_file), _number(folder / usage_file)
            if limit is not None and usage is not None:
                left.append(max(0, limit - usage + _cache(folder / "memory.stat")))
    return min(left)


def _own_cgroups(cgroups: Path, own: Path) -> list[Path]:
    """Return the folders of this process's cgroups and of their parents, of version 1 or 2."""
    try:
        lines = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:  # not Linux
        return []
    found: list[Path] = []
    for _, controllers, path in lines:
        if controllers not in ("", "memory"):
            continue
        root = cgroups / controllers
        inner = root / path.lstrip("/")
        found += [folder for folder in (inner, *inner.parents) if folder == root or root in folder.parents]
    return found


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # there is none, or it says "max"
        return None


def _cache(file: Path) -> int:
    try:
        values = dict(line.split(" ", 1) for line in file.read_text().splitlines())
        return max(int(values.get(name, 0)) for name in _CACHE)
    except (OSError, ValueError):
        return 0
