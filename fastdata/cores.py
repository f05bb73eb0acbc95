"""How many cores this process may really use: affinity, cgroup quota, and the ranks that share the machine."""

from __future__ import annotations

import math
import os
from pathlib import Path


def usable_cores(cgroup_root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> int:
    """Return the cores for this process, >= 1: the least of affinity and cgroup quota, shared by local ranks.

    Args:
        cgroup_root: Where the cgroup file system is mounted.
        membership: The file that names this process's cgroup.
    """
    cores = float(affinity_cores())
    quota = cgroup_quota_cores(cgroup_root, membership)
    if quota is not None:
        cores = min(cores, quota)
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, math.floor(cores / max(1, local_ranks)))


def affinity_cores() -> int:
    """Return the number of logical cores that the scheduler may run this process on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cgroup_quota_cores(cgroup_root: Path, membership: Path) -> float | None:
    """Return the CPU quota in cores (cgroup v2 ``cpu.max`` or v1 ``cpu.cfs_quota_us``), or None without one.

    The quotas of all parents bind too, so the least of the path counts.
    """
    quotas = [
        quota
        for folder in _cgroup_folders(cgroup_root, membership)
        if (quota := _quota_of(folder)) is not None and quota > 0
    ]
    return min(quotas) if quotas else None


def _cgroup_folders(cgroup_root: Path, membership: Path) -> list[Path]:
    folders = [cgroup_root, cgroup_root / "cpu"]
    if not membership.exists():
        return folders
    for line in membership.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        base = cgroup_root if not controllers else cgroup_root / "cpu"
        if controllers and "cpu" not in controllers.split(","):
            continue
        place = base / path.lstrip("/")
        while place != base and base in place.parents:
            folders.append(place)
            place = place.parent
    return folders


def _quota_of(folder: Path) -> float | None:
    unified = folder / "cpu.max"
    if unified.is_file():
        quota, period = unified.read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    legacy, period_file = folder / "cpu.cfs_quota_us", folder / "cpu.cfs_period_us"
    if legacy.is_file() and period_file.is_file():
        quota_us = int(legacy.read_text())
        return None if quota_us < 0 else quota_us / int(period_file.read_text())
    return None
