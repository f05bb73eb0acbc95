"""One shard being written: the file grows, its digest is made beside, and it appears under its name only when whole."""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path

from fastdata.shards.tarformat import archive_end

_FLUSH_BYTES = 2 << 20  # each hand-over between threads costs as much as some 100 kB of copying
_WRITES_AHEAD = 8


class ShardFile:
    """A tar under a temporary name. Writing and hashing run in two threads, so the slower one sets the pace."""

    def __init__(self, temporary: Path, write_pool: ThreadPoolExecutor, hash_pool: ThreadPoolExecutor) -> None:
        """Open the file.

        Args:
            temporary: Its name until `publish`.
            write_pool: One thread that writes.
            hash_pool: One thread that hashes.
        """
        self.payload_bytes = 0
        self._path = temporary
        self._handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        self._write_pool, self._hash_pool = write_pool, hash_pool
        self._digest = hashlib.sha256()
        self._on_their_way: deque[Future[None]] = deque()
        self._pieces: list[memoryview] = []
        self._pieces_bytes = 0
        self._segment = memoryview(b"")  # the run of bytes that grows while samples lie side by side
        self._start = self._stop = 0

    def add(self, segment: memoryview, start: int, stop: int) -> None:
        """Append ``segment[start:stop]``, which must not change any more."""
        if segment is not self._segment or start != self._stop:
            self._close_piece()
            self._segment, self._start = segment, start
        self._stop = stop
        self.payload_bytes += stop - start
        if self._pieces_bytes + self._stop - self._start >= _FLUSH_BYTES:
            self._send()

    def finish(self) -> tuple[str, int]:
        """Write the archive's end and wait until all is on the disk.

        Returns:
            The file's sha256 and its size in bytes.
        """
        self._close_piece()
        end = archive_end(self.payload_bytes)
        self._pieces.append(memoryview(end))
        self._send()
        while self._on_their_way:
            self._on_their_way.popleft().result()
        os.fsync(self._handle)
        size = os.fstat(self._handle).st_size
        assert size == self.payload_bytes + len(end)
        self._close()
        return self._digest.hexdigest(), size

    def publish(self, final: Path) -> None:
        """Give the finished file its name."""
        os.replace(self._path, final)

    def discard(self) -> None:
        """Remove the file; what is on its way is waited for first."""
        while self._on_their_way:
            self._on_their_way.popleft().exception()
        self._close()
        self._path.unlink(missing_ok=True)

    def _close_piece(self) -> None:
        if self._stop > self._start:
            self._pieces.append(self._segment[self._start : self._stop])
            self._pieces_bytes += self._stop - self._start
        self._segment, self._start, self._stop = memoryview(b""), 0, 0

    def _send(self) -> None:
        self._close_piece()
        pieces, self._pieces, self._pieces_bytes = self._pieces, [], 0
        self._on_their_way.append(self._write_pool.submit(_write_all, self._handle, pieces))
        self._on_their_way.append(self._hash_pool.submit(_hash_all, self._digest, pieces))
        while len(self._on_their_way) > 2 * _WRITES_AHEAD:
            self._on_their_way.popleft().result()

    def _close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def _write_all(handle: int, pieces: Sequence[memoryview]) -> None:
    left = list(pieces)
    size = sum(map(len, left))
    while left:
        done = os.writev(handle, left)
        while left and done >= len(left[0]):
            done -= len(left.pop(0))
        if done:
            left[0] = left[0][done:]
    _start_writeback(handle, size)


def _start_writeback(handle: int, size: int) -> None:
    """Let the disk begin with what was just written, so that little is left for the fsync at the end (Linux only)."""
    start = _sync_file_range()
    if start is not None:
        start(handle, os.lseek(handle, 0, os.SEEK_CUR) - size, size, 2)  # 2: SYNC_FILE_RANGE_WRITE; advice, may fail


@cache
def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    function = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if function is not None:
        function.argtypes = [ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong, ctypes.c_uint]
    return function


def _hash_all(digest: hashlib._Hash, pieces: Sequence[memoryview]) -> None:
    for piece in pieces:
        digest.update(piece)
