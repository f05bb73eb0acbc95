"""Which part of the data lies in the page cache, and how to put all of it there or none of it."""

from __future__ import annotations

import ctypes
import glob
import mmap
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fastdata.reading import Reading

MAX_PROBED_FILES = 2_000
"""Files that `resident_percent` looks at; of more it takes evenly spaced ones."""
_CHUNK_BYTES = 4 << 20


def data_files(data: str) -> list[Path] | None:
    """Return the local files that a pipeline on `data` reads, sorted; None where they are remote.

    Args:
        data: A folder, a file, a glob, a ``{000..099}`` range, several of these separated by commas, or URLs.
    """
    if "://" in data and not data.startswith("file://"):
        return None
    root = Path(data)
    if root.is_dir():
        return sorted(Path(folder, name) for folder, _, names in os.walk(root, followlinks=True) for name in names)
    if root.is_file():
        return [root]
    from webdataset.shardlists import expand_urls  # the notation is webdataset's own

    return [Path(path) for pattern in expand_urls(data) for path in sorted(glob.glob(pattern)) or [pattern]]


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

    Since Linux 5.2 ``mincore`` answers truly only for files that the caller owns or may write to, and else says that all
    is there.
    """
    stride = max(1, -(-len(files) // MAX_PROBED_FILES))
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
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
