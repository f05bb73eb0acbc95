"""Opens a shard wherever it lies, with the openers of `webdataset` and `fsspec`, and notices a bad end."""

from __future__ import annotations

import bz2
import gzip
import lzma
import shutil
import subprocess
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fastdata.errors import ShardError, SourceError, UsageError
from fastdata.sources.shardlist import is_url

BROKEN = (tarfile.TarError, OSError, EOFError, ValueError, zlib.error, lzma.LZMAError)
"""What reading a damaged archive raises."""
READ_BYTES = 1 << 16
"""Bytes a read; a multiple of tar's blocks."""
REPAIR = "Copy or make the shard again."
_EXIT_WAIT_S = 10.0
_CURL_EXITS = {
    6: "no such host",
    7: "no connection",
    18: "the transfer broke off",
    22: "the server says that it is not there or not allowed",
    28: "timed out",
    56: "the connection broke",
}
_OPEN_COMPRESSED: dict[bytes, Callable[[Any], Any]] = {b"\x1f\x8b": gzip.open, b"BZ": bz2.open, b"\xfd7": lzma.open}


def expand_url(url: str) -> list[str]:
    """Return what the ``{000..099}`` ranges in a URL or command stand for."""
    import braceexpand  # comes with webdataset, whose ranges these are

    try:
        return list(braceexpand.braceexpand(url, escape=False))  # a backslash in a command is the shell's
    except ValueError as exc:
        raise SourceError(url, str(exc), "a range such as {000000..000099}") from exc


def check_scheme(url: str, allow_pipe: bool) -> None:
    """Refuse a URL that nothing here opens, and a command that may not run.

    Raises:
        UsageError: A command without leave.
        SourceError: What opens such URLs is not installed.
    """
    from webdataset.gopen import gopen_curl, gopen_schemes

    scheme = url.partition(":")[0].lower()
    if scheme == "pipe":
        if not allow_pipe:
            raise UsageError(
                "data", f"a command ({url})", "paths and URLs",
                "Allow commands with options=fastdata.WebDatasetOptions(allow_pipe=True), if you trust this one.",
            )  # fmt: skip
    elif gopen_schemes.get(scheme) is gopen_curl:
        if shutil.which("curl") is None:
            raise SourceError(url, f"curl, which reads {scheme}:// shards, is not installed", "", "Install curl.")
    elif scheme not in gopen_schemes:
        try:
            import fsspec

            fsspec.get_filesystem_class(scheme)
        except (ImportError, ValueError) as exc:
            remedy = "pip install fsspec and the package of the store (s3fs for s3://, adlfs for abfs://)."
            raise SourceError(url, f"nothing here opens {scheme}:// ({exc})", "", remedy) from exc


class Connection:
    """What a read may wait for, so that another thread can end it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False

    def attach(self, process: subprocess.Popen[bytes] | None) -> None:
        """Take the process that a read waits for; it ends at once where `stop` came before."""
        self._process = process
        if self._stopped:
            self.stop()

    def stop(self) -> None:
        """End the process; the read sees the end of its output."""
        self._stopped = True
        if self._process is not None:
            self._process.kill()


class TailKeeper:
    """A stream that remembers the end of what was read, to tell a whole archive from one that stops."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._before = b""  # the block before the latest read: a header may lie across both
        self._latest = b""
        self._total = 0

    def read(self, size: int) -> bytes:
        """Return up to `size` bytes; none at the end."""
        data: bytes = self._file.read(size)
        if data:
            latest = self._latest[-tarfile.BLOCKSIZE :]
            self._before, self._latest = (self._before + latest)[-tarfile.BLOCKSIZE :], data
            self._total += len(data)
        return data

    def check_end(self, end: int, shard: str) -> None:
        """Read what is left and check that the archive is over: `tarfile` takes a damaged header for its end.

        Args:
            end: Where the archive's end mark is, in bytes.
            shard: For messages.

        Raises:
            ShardError: There is no end mark, or something behind it.
        """
        kept = self._before + self._latest
        rest = kept[end - (self._total - len(kept)) :]
        while len(rest) < tarfile.BLOCKSIZE and (more := self.read(tarfile.BLOCKSIZE)):
            rest += more
        if len(rest) < tarfile.BLOCKSIZE:
            found, expected = f"it ends at byte {end} without the archive's end mark", "a whole tar archive"
            raise ShardError(shard, found, expected, REPAIR)
        while rest:
            if rest.strip(b"\0"):
                found = f"no tar header at byte {end}, and more behind it"
                raise ShardError(shard, found, "one whole tar archive", REPAIR)
            rest = self.read(READ_BYTES)


class _Beginning:
    """A stream whose first bytes were looked at already."""

    def __init__(self, start: bytes, file: Any) -> None:
        self._start = start
        # What is there already; `read` would wait for all it was asked for.
        self._read: Callable[[int], bytes] = getattr(file, "read1", file.read)
        self.ended = False

    def read(self, size: int = -1) -> bytes:
        """Return up to `size` bytes; none at the end."""
        if self._start:
            end = len(self._start) if size < 0 else size
            data, self._start = self._start[:end], self._start[end:]
        else:
            data = self._read(size)
            self.ended = not data
        return data


@contextmanager
def opened(url: str, connection: Connection) -> Iterator[TailKeeper]:
    """Open a shard wherever it lies, decompressed; at the end, a command must have ended well.

    Args:
        url: A path, URL or command.
        connection: Ends a read that waits.

    Raises:
        ShardError: The command or the connection failed.
    """
    handle = _open(url)
    command = handle if hasattr(handle, "proc") else None
    # Not Pipe.read: it throws away what a command wrote before it failed, or not, as the two processes happen to run.
    file = handle if command is None else command.stream
    try:
        connection.attach(None if command is None else command.proc)
        start = file.read(6)
        raw = _Beginning(start, file)
        opener = _OPEN_COMPRESSED.get(start[:2])
        try:
            yield TailKeeper(raw if opener is None else opener(raw))
        except (*BROKEN, ShardError):
            if command is not None and raw.ended:
                _check_exit(command, url)
            raise
        if command is not None:
            _check_exit(command, url)
    finally:
        if command is not None:
            command.proc.kill()
        file.close()
        if command is not None:
            command.proc.wait()


def _open(url: str) -> Any:
    if not is_url(url):
        return open(url, "rb")
    from webdataset.gopen import gopen, gopen_schemes

    if url.partition(":")[0].lower() in gopen_schemes:
        return gopen(url, "rb", bufsize=READ_BYTES)
    import fsspec

    return fsspec.open(url, "rb").open()


def _check_exit(command: Any, url: str) -> None:
    try:
        code = command.proc.wait(_EXIT_WAIT_S)
    except subprocess.TimeoutExpired:
        return  # it closed its output and lives on: all data came
    if code == 0:
        return
    meaning = "" if url.startswith("pipe:") else _CURL_EXITS.get(code, "")
    raise ShardError(
        url,
        f"the command that reads it ended with exit code {code}{meaning and f' ({meaning})'}",
        "exit code 0",
        "Run it by hand to see what is wrong." if url.startswith("pipe:") else "Check the address and the server.",
    )
