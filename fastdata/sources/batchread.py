"""Reading many files in one compiled call, which does not hold the interpreter.

In Python each file costs four system calls, and around each of them the interpreter is given away and waited for. With
16 loading threads that, not the reading, was the limit.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numpy.typing import NDArray

from fastdata._native import _intrinsic, compiled, copy_bytes, inlined
from fastdata.sources.paths import PathTable

_OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC
_FROM_END = os.SEEK_END
_ALIGNMENT = 64
_FIRST_ROOM_BYTES = 4 << 20
_UNREAD = -1


class _Room(threading.local):
    """A thread's memory for what it read last. Fresh memory would cost a page fault every 4 KiB."""

    def __init__(self) -> None:
        self.memory = np.empty(_FIRST_ROOM_BYTES, np.uint8)


_room_of_thread = _Room()


def read_files(prefix: bytes, table: PathTable, ids: NDArray[np.int64]) -> list[memoryview | None]:
    """Read some files of a table.

    Args:
        prefix: Goes before each path; ends with a separator.
        table: Relative paths.
        ids: (n,) int64 places in the table.

    Returns:
        n views of the files' bytes, valid until the same thread calls this again; None for a file that could not be
        read, or changed its size meanwhile: reading it alone tells why.
    """
    starts, stops = table.offsets[ids], table.offsets[ids + 1]
    start_of_path = np.frombuffer(prefix, np.uint8)
    path = np.empty(len(prefix) + int((stops - starts).max(initial=0)) + 1, np.uint8)
    places, sizes = np.empty(len(ids), np.int64), np.empty(len(ids), np.int64)
    found: list[memoryview | None] = []
    room, used_bytes = _room_of_thread.memory, 0
    while len(found) < len(ids):
        first = len(found)
        stop = int(_read_files(start_of_path, table.blob, starts, stops, path, first, room, places, sizes))
        view = room.data
        for place, size in zip(places[first:stop].tolist(), sizes[first:stop].tolist(), strict=True):
            found.append(None if size == _UNREAD else view[place : place + size])
            used_bytes += max(0, size) + _ALIGNMENT
        if stop < len(ids):  # it did not fit: memory for the rest now, and for all of it the next time
            mean_bytes = used_bytes // max(1, stop)
            room = np.empty(max(int(sizes[stop]) + _ALIGNMENT, mean_bytes * (len(ids) - stop) * 5 // 4), np.uint8)
    if used_bytes > len(_room_of_thread.memory):
        _room_of_thread.memory = np.empty(used_bytes * 5 // 4, np.uint8)
    return found


def _call_of_c(name: str, result: Any, *arguments: Any) -> Any:
    """Return an intrinsic that calls a function of the C library on integers."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kind = ir.FunctionType(
            context.get_value_type(signature.return_type), [context.get_value_type(t) for t in signature.args]
        )
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), values)

    if len(arguments) == 1:

        def call(_typing: Any, _a: Any) -> Any:
            return result(*arguments), generate
    elif len(arguments) == 2:

        def call(_typing: Any, _a: Any, _b: Any) -> Any:  # type: ignore[misc]
            return result(*arguments), generate
    elif len(arguments) == 3:

        def call(_typing: Any, _a: Any, _b: Any, _c: Any) -> Any:  # type: ignore[misc]
            return result(*arguments), generate
    else:

        def call(_typing: Any, _a: Any, _b: Any, _c: Any, _d: Any) -> Any:  # type: ignore[misc]
            return result(*arguments), generate

    return _intrinsic(call)


# Addresses and sizes are 64 bits wide wherever numba's kernels run; `open` takes its third argument only with O_CREAT.
_open = _call_of_c("open", types.int32, types.int64, types.int32)
_lseek = _call_of_c("lseek", types.int64, types.int32, types.int64, types.int32)
_pread = _call_of_c("pread", types.int64, types.int32, types.int64, types.int64, types.int64)
_close = _call_of_c("close", types.int32, types.int32)


@inlined
def _read_whole(handle: int, size: int, target: int) -> bool:
    """Read `size` bytes to an address; return whether there were as many."""
    got = 0
    while got < size:
        count = _pread(handle, target + got, size - got, got)
        if count <= 0:
            return False
        got += count
    return True


@compiled
def _read_files(
    prefix: NDArray[np.uint8],
    blob: NDArray[np.uint8],
    starts: NDArray[np.int64],
    stops: NDArray[np.int64],
    path: NDArray[np.uint8],
    first: int,
    room: NDArray[np.uint8],
    places: NDArray[np.int64],
    sizes: NDArray[np.int64],
) -> int:
    """Read files into `room` until one does not fit; return its number, with its size noted."""
    used = 0
    path_address, room_address = path.ctypes.data, room.ctypes.data
    copy_bytes(path_address, prefix.ctypes.data, prefix.size)
    for i in range(first, len(starts)):
        length = stops[i] - starts[i]
        copy_bytes(path_address + prefix.size, blob.ctypes.data + starts[i], length)
        path[prefix.size + length] = 0
        places[i], sizes[i] = used, _UNREAD
        handle = _open(path_address, _OPEN_FLAGS)
        if handle < 0:
            continue
        size = _lseek(handle, 0, _FROM_END)
        if size >= 0 and used + size > room.size:
            _close(handle)
            sizes[i] = size
            return i
        if size >= 0 and _read_whole(handle, size, room_address + used):
            sizes[i] = size
            used += (size + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
        _close(handle)
    return len(starts)
