"""Which part of the data lies in the page cache, and how to put all of it there or none of it.

A row says "warm" or "cold"; `CacheKeeper` brings the cache into that state and says what it really is.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import psutil

from fastdata.errors import SourceError
from fastdata.reading import Reading
from fastdata.sources.open import is_shards, is_stream
from fastdata.sources.shardlist import list_shards

WARM_PERCENT = 99.0
COLD_PERCENT = 1.0
MEMORY_SHARE = 0.7
"""Data up to this share of the free memory are read into the page cache before a warm row."""
MAX_PROBED_FILES = 2_000
"""Files that `resident_percent` looks at; of more it takes evenly spaced ones."""
_CHUNK_BYTES = 4 << 20

Cache = Literal["warm", "cold"]


def data_files(data: str) -> list[Path] | None:
    """Return the local files that a pipeline on `data` reads, sorted; None where they are remote.

    Args:
        data: A folder, or shards as `fastdata.sources.shardlist.list_shards` takes them, or a URL.

    Raises:
        SourceError: There is nothing.
    """
    if is_stream(data):
        return None
    if is_shards(data):
        return [Path(path) for path in list_shards(data)[0]]
    if not Path(data).is_dir():
        raise SourceError(data, "does not exist", "a folder or shards")
    return sorted(Path(folder, name) for folder, _, names in os.walk(data, followlinks=True) for name in names)


def total_bytes(files: Sequence[Path]) -> int:
    """Return the summed size of the files."""
    return sum(path.stat().st_size for path in files)


def read_all(files: Sequence[Path], threads: int = 8) -> int:
    """Read every file once, so that it lies in the page cache as far as memory allows; return the bytes read."""
    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(_read_through, files))


def drop(files: Sequence[Path]) -> None:
    """Ask the system to forget the cached pages of the files, after writing changed ones to the disk.

    It may decline, for example for files that another process maps: look with `resident_percent` afterwards.
    """
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # a page that waits to be written is never dropped
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def resident_percent(files: Sequence[Path]) -> Reading:
    """Return how much of the files lies in the page cache, in percent of their pages, by ``mincore``.

    Since Linux 5.2 ``mincore`` answers truly only for files that the caller owns or may write to, and else says that
    all is there.
    """
    stride = max(1, -(-len(files) // MAX_PROBED_FILES))
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *([ctypes.c_int] * 3), ctypes.c_long]
        libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
        pages = resident = 0
        for path in files[::stride]:
            in_file, in_cache = _pages_of(libc, path)
            pages, resident = pages + in_file, resident + in_cache
    except (OSError, AttributeError) as exc:
        return Reading(None, f"the page cache cannot be looked at: {exc}")
    return Reading(100.0 * resident / pages) if pages else Reading(None, "the files are empty")


def _pages_of(libc: ctypes.CDLL, path: Path) -> tuple[int, int]:
    size = path.stat().st_size
    if not size:
        return 0, 0
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if not (os.access(path, os.W_OK) or os.fstat(descriptor).st_uid == os.geteuid()):
            raise PermissionError(f"mincore needs to own {path} or to be allowed to write to it")
        address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
        if address in (None, ctypes.c_void_p(-1).value):
            raise OSError(ctypes.get_errno(), f"mmap of {path}")
        try:
            count = -(-size // mmap.PAGESIZE)
            flags = (ctypes.c_ubyte * count)()
            if libc.mincore(address, size, flags):
                raise OSError(ctypes.get_errno(), f"mincore of {path}")
            return count, bytes(flags).translate(_LOW_BIT).count(1)
        finally:
            libc.munmap(address, size)
    finally:
        os.close(descriptor)


_LOW_BIT = bytes(value & 1 for value in range(256))


def _read_through(path: Path) -> int:
    done = 0
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK_BYTES):
            done += len(chunk)
    return done


class CacheKeeper:
    """Remembers the files of each data set, so that they are listed once."""

    def __init__(self) -> None:
        """Know nothing yet."""
        self._files: dict[str, list[Path] | None] = {}

    def prepare(self, data: str, wanted: Cache) -> dict[str, Any]:
        """Warm or drop the files, look, and return ``cache``, ``resident_percent`` (or None) and ``note``.

        Args:
            data: What the pipeline opens.
            wanted: "warm": every file is read once, where memory holds them. "cold": their pages are dropped.
        """
        if data not in self._files:
            self._files[data] = data_files(data)
        files = self._files[data]
        if files is None:
            return {"cache": "warm", "resident_percent": None, "note": "remote data have no page cache"}
        return _cold(files) if wanted == "cold" else _warm(files)


def _warm(files: list[Path]) -> dict[str, Any]:
    state = resident_percent(files)
    if state.value is not None and state.value >= WARM_PERCENT:
        return {"cache": "warm", "resident_percent": state.value, "note": ""}
    size, free = total_bytes(files), psutil.virtual_memory().available
    if size > MEMORY_SHARE * free:
        note = f"{size / 1e9:.1f} GB of data do not fit into {free / 1e9:.1f} GB of free memory: a part comes from disk"
        return {"cache": "warm", "resident_percent": state.value, "note": note}
    read_all(files)
    state = resident_percent(files)
    return {"cache": "warm", "resident_percent": state.value, "note": state.reason}


def _cold(files: list[Path]) -> dict[str, Any]:
    try:
        drop(files)
    except (OSError, AttributeError) as exc:
        return {"cache": "warm", "resident_percent": resident_percent(files).value, "note": f"not dropped: {exc}"}
    state = resident_percent(files)
    if state.value is None:
        return {"cache": "cold", "resident_percent": None, "note": f"dropped, but not verified: {state.reason}"}
    if state.value > COLD_PERCENT:
        note = f"asked to be cold, but {state.value:.0f} % of the pages stayed in the page cache"
        return {"cache": "warm", "resident_percent": state.value, "note": note}
    return {"cache": "cold", "resident_percent": state.value, "note": ""}
