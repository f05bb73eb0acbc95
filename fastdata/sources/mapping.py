"""Files mapped into memory without a file descriptor each.

``mmap.mmap`` keeps a duplicate of the descriptor until Python 3.13, so 300 shards would use up a limit of 256. The
system's own call needs the descriptor only while it maps.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

_PAGE = mmap.PAGESIZE


def map_file(path: str | bytes | os.PathLike[str]) -> tuple[memoryview, int]:
    """Map a whole file for reading, shared with every process that maps it.

    A slice of the view keeps the map alive, so no reader ever looks at memory that is gone. A file that somebody cuts
    while it is mapped kills the process on access (SIGBUS), as with every memory map.

    Returns:
        The file's bytes, read-only, and their address for `advise_will_need` (0: no advice possible). An empty file
        gives an empty view.

    Raises:
        OSError: The file cannot be opened or mapped.
    """
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    try:
        size = os.fstat(handle).st_size
        if size == 0:
            return memoryview(b""), 0
        if sys.platform == "win32":
            return memoryview(mmap.mmap(handle, size, access=mmap.ACCESS_READ)), 0
        library = _c_library()
        address = library.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, handle, 0)
        if address in (None, ctypes.c_void_p(-1).value):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), os.fsdecode(path))
    finally:
        os.close(handle)
    owner = (ctypes.c_ubyte * size).from_address(address)
    # The view holds `owner`, so this runs after the last slice of it is gone.
    weakref.finalize(owner, library.munmap, address, size).atexit = False
    return memoryview(owner).cast("B").toreadonly(), address


def advise_will_need(address: int, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> None:
    """Start reading byte ranges of a mapped file in the background.

    Args:
        address: What `map_file` returned.
        starts: (n,) int64 ascending first bytes.
        stops: (n,) int64 ends; ranges that touch or overlap by pages are joined.
    """
    if not address or not len(starts):
        return
    first = starts // _PAGE * _PAGE
    ends_of_pages = -(-np.maximum.accumulate(stops) // _PAGE) * _PAGE
    breaks = np.flatnonzero(first[1:] > ends_of_pages[:-1]) + 1
    begins = first[np.concatenate([[0], breaks])]
    ends = np.maximum.reduceat(stops, np.concatenate([[0], breaks]))
    library = _c_library()
    for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
        library.madvise(address + begin, end - begin, mmap.MADV_WILLNEED)


@cache
def _c_library() -> Any:
    library = ctypes.CDLL(None, use_errno=True)
    declare: Callable[[Any, Any, list[Any]], None] = _declare
    declare(library.mmap, ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_longlong])
    declare(library.munmap, ctypes.c_int, [ctypes.c_void_p, ctypes.c_size_t])
    declare(library.madvise, ctypes.c_int, [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int])
    return library


def _declare(function: Any, result: Any, arguments: list[Any]) -> None:
    function.restype, function.argtypes = result, arguments
