"""The meters of a run: CPU time, memory and disk bytes of the whole process tree, and the GPU's through `fastdata.gpu`.

Counters (CPU time, disk bytes) are read when a window opens and when it closes, never estimated from samples. Gauges
(memory, GPU) are sampled by one thread that sleeps most of the time.
"""

from __future__ import annotations

import math
import os
import platform
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from fastdata.cores import affinity_cores, cgroup_quota_cores
from fastdata.gpu import GpuMeter, UnreadableGpu
from fastdata.reading import Reading

SAMPLE_INTERVAL_S = 0.2
"""Between two samples of the GPU; NVML itself averages over 1/6 s to 1 s."""
MEMORY_INTERVAL_S = 1.0
"""Between two samples of the memory, at least."""
MEMORY_DUTY = 100
"""A memory sample that took t seconds is followed by a pause of at least this many t: reading ``smaps_rollup`` walks
the page table under a lock that page faults need, so a large process must be sampled rarely."""


@dataclass(frozen=True)
class TreeUsage:
    """What a process and all its descendants have used since they started."""

    cpu_s: float
    """User and system seconds, children that ended and were waited for included."""
    disk_read_bytes: int | None
    """Bytes fetched from storage (not from the page cache), or None where the system does not tell."""
    processes: int
    """Live processes."""


@dataclass(frozen=True)
class _Counters:
    """All counters at one moment."""

    at: float
    tree: TreeUsage
    machine_cpu_s: float


@dataclass(frozen=True)
class Usage:
    """What a window cost."""

    wall_s: float
    """Seconds between the two readings of the counters."""
    readings: dict[str, Reading]
    """By JSON field name: ``cpu_percent`` (100 = one core), ``other_cpu_percent`` (of processes outside the tree),
    ``peak_memory_mb`` (10^6 bytes), ``disk_read_mb``, ``gpu_*``, ``jpeg_engine_percent``."""
    processes: int
    """Live processes of the tree at the end."""


def cores_available() -> float:
    """Return the cores that this machine gives to this process: affinity, bounded by the cgroup's CPU quota."""
    quota = cgroup_quota_cores(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))
    return min(float(affinity_cores()), quota) if quota is not None else float(affinity_cores())


def machine_id() -> str:
    """Return what processes of one machine have in common, in containers too: they share the CPU time counters."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()


def read_tree_usage(pid: int) -> TreeUsage:
    """Sum the counters of a process and its live descendants.

    The kernel adds the counters of a child to its parent's when the parent waits for it, so the sum over the live tree
    of own and children's counters holds what ended workers used. Not counted: a process that left the tree (a daemon).

    Args:
        pid: The root of the tree.
    """
    cpu_s, disk, alive = 0.0, 0, 0
    disk_known = True
    for process in _tree(pid):
        try:
            times = process.cpu_times()
            cpu_s += times.user + times.system
            cpu_s += getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0)
            alive += 1
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # ended since the tree was listed: its parent, which is read later, has its counters
        try:
            disk += process.io_counters().read_bytes
        except (psutil.Error, AttributeError, OSError):
            disk_known = disk_known and process.pid != pid
    return TreeUsage(cpu_s, disk if disk_known else None, alive)


def read_tree_pss_mb(pid: int) -> Reading:
    """Return the proportional set size of a process tree in 10^6 bytes: shared pages count once, not once a process.

    Args:
        pid: The root of the tree.
    """
    total_kb, root_read = 0, False
    for process in _tree(pid):
        try:
            text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
        except FileNotFoundError:
            if process.pid == pid:
                return Reading(None, "this system has no /proc/PID/smaps_rollup")
            continue  # ended since the tree was listed
        except (PermissionError, ProcessLookupError) as exc:
            if process.pid == pid:
                return Reading(None, f"/proc/PID/smaps_rollup: {exc.strerror}")
            continue
        for line in text.splitlines():
            if line.startswith("Pss:"):
                total_kb += int(line.split()[1])
                root_read = root_read or process.pid == pid
    return Reading(total_kb * 1024 / 1e6) if root_read else Reading(None, "no Pss line in /proc/PID/smaps_rollup")


class Monitor:
    """Meters this process, its descendants and one GPU over a window.

    Use: ``start``, then ``open_window`` and ``close_window`` around the work, then ``stop``; or as a context manager.
    """

    def __init__(self, gpu: GpuMeter | UnreadableGpu, *, pid: int | None = None) -> None:
        """Prepare; nothing runs yet.

        Args:
            gpu: The card's meters, from `fastdata.gpu.open_gpu_meter`.
            pid: Root of the process tree; None is this process.
        """
        self._gpu = gpu
        self._pid = os.getpid() if pid is None else pid
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="fastdata-monitor", daemon=True)
        self._peak_memory = Reading(None, "not sampled")
        self._next_memory_at = 0.0
        self._opened: _Counters | None = None

    def __enter__(self) -> Monitor:
        """Start sampling."""
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop sampling."""
        self.stop()

    def start(self) -> None:
        """Take a first memory sample (slow, so outside of every window) and start the sampling thread."""
        self._sample_memory()
        self._thread.start()

    def open_window(self) -> None:
        """Read the counters; from here on the window counts."""
        self._gpu.open_window()
        self._opened = self._read_counters()

    def close_window(self) -> Usage:
        """Read the counters again and return what the window cost."""
        if self._opened is None:
            raise RuntimeError("close_window() before open_window()")
        before, after = self._opened, self._read_counters()
        wall_s = after.at - before.at
        tree_cpu_s = after.tree.cpu_s - before.tree.cpu_s
        readings = {
            "cpu_percent": Reading(100.0 * tree_cpu_s / wall_s),
            "other_cpu_percent": _other_cpu(after.machine_cpu_s - before.machine_cpu_s - tree_cpu_s, wall_s),
        }
        if after.tree.disk_read_bytes is None or before.tree.disk_read_bytes is None:
            readings["disk_read_mb"] = Reading(None, "this system does not tell the bytes a process read from disk")
        else:
            read_bytes = after.tree.disk_read_bytes - before.tree.disk_read_bytes
            readings["disk_read_mb"] = Reading(read_bytes / 1e6)
        readings |= self._gpu.close_window()
        self._sample_memory()
        readings["peak_memory_mb"] = self._peak_memory
        return Usage(wall_s, readings, after.tree.processes)

    def stop(self) -> None:
        """Stop the thread and release the card. Idempotent."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()
        self._gpu.close()

    def _read_counters(self) -> _Counters:
        return _Counters(time.perf_counter(), read_tree_usage(self._pid), machine_cpu_s())

    def _sample(self) -> None:
        while not self._stopped.wait(SAMPLE_INTERVAL_S):
            self._gpu.sample()
            if time.perf_counter() >= self._next_memory_at:
                self._sample_memory()

    def _sample_memory(self) -> None:
        started = time.perf_counter()
        sample = read_tree_pss_mb(self._pid)
        if sample.value is None:
            self._next_memory_at = math.inf
            if self._peak_memory.value is None:
                self._peak_memory = sample
            return
        self._peak_memory = Reading(max(sample.value, self._peak_memory.value or 0.0))
        ended = time.perf_counter()
        self._next_memory_at = ended + max(MEMORY_INTERVAL_S, MEMORY_DUTY * (ended - started))


def machine_cpu_s() -> float:
    """Return the CPU seconds that the whole machine has worked since it started, stolen ones included."""
    times = psutil.cpu_times()._asdict()
    busy = ("user", "nice", "system", "irq", "softirq", "steal")  # guest time is part of user time
    return float(sum(times.get(name, 0.0) for name in busy))


def _other_cpu(other_s: float, wall_s: float) -> Reading:
    if cores_available() < (os.cpu_count() or 1):
        return Reading(None, "this process has a part of the machine's cores: whom others disturb is not known")
    return Reading(max(0.0, 100.0 * other_s / wall_s))


def _tree(pid: int) -> list[psutil.Process]:
    """Return a process and its descendants, descendants first."""
    try:
        root = psutil.Process(pid)
        return [*reversed(root.children(recursive=True)), root]
    except psutil.NoSuchProcess:
        return []
