"""One shard being written: the file grows, its digest is made beside, and it appears under its name only when whole."""

from __future__ import annotations

import hashlib
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from fastdata.shards.tarformat import archive_end

_FLUSH_BYTES = 4 << 20  # large writes; small enough that two on their way cost little memory
_PIECES_ON_THEIR_WAY = 4


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
        self._pools = (write_pool, hash_pool)
        self._pieces: list[bytes] = []
        self._piece_bytes = 0
        self._digest = hashlib.sha256()
        self._on_their_way: deque[Future[None]] = deque()

    def add(self, parts: tuple[bytes, ...], size: int) -> None:
        """Append bytes.

        Args:
            parts: Written one after another.
            size: Their length in all.
        """
        self._pieces.extend(parts)
        self._piece_bytes += size
        self.payload_bytes += size
        if self._piece_bytes >= _FLUSH_BYTES:
            self._send()

    def finish(self) -> tuple[str, int]:
        """Write the archive's end and wait until all is on the disk.

        Returns:
            The file's sha256 and its size in bytes.
        """
        end = archive_end(self.payload_bytes)
        self._pieces.append(end)
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

    def _send(self) -> None:
        block = b"".join(self._pieces)
        self._pieces, self._piece_bytes = [], 0
        write_pool, hash_pool = self._pools
        self._on_their_way.append(write_pool.submit(_write_all, self._handle, block))
        self._on_their_way.append(hash_pool.submit(self._digest.update, block))
        while len(self._on_their_way) > 2 * _PIECES_ON_THEIR_WAY:
            self._on_their_way.popleft().result()

    def _close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def _write_all(handle: int, block: bytes) -> None:
    view = memoryview(block)
    while view:
        view = view[os.write(handle, view) :]
