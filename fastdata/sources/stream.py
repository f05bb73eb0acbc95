"""Shards that are read from start to end because they have no index here: remote ones, pipes, or local ones on request.

The `webdataset` library opens URLs and groups members into samples, Python's `tarfile` reads the archives. What either
of them passes over in silence (a cut or damaged archive, half samples, a command that fails) becomes a `Lost` here.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import lzma
import re
import shutil
import subprocess
import tarfile
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from fastdata.errors import ShardError, SourceError, UsageError
from fastdata.sources.paths import IMAGE_EXTENSIONS
from fastdata.sources.shardlist import is_url, list_shards, missing_shards_error
from fastdata.sources.sidebyside import read_side_by_side
from fastdata.sources.tarscan import LABEL_EXTENSIONS, LABEL_FORMAT, parse_label

Split = Literal["shards", "samples"]

_OWN_KEY = re.compile(r"[0-9]{9}")
_PICTURES_WITHOUT_LABEL = 1000  # pictures of one shard that wait for their label before the shard is refused
_BROKEN = (tarfile.TarError, OSError, EOFError, ValueError, zlib.error, lzma.LZMAError)
_READ_BYTES = 1 << 16  # a multiple of tar's blocks
_EXIT_WAIT_S = 10.0
_REPAIR = "Copy or make the shard again."
_CURL_EXITS = {
    6: "no such host",
    7: "no connection",
    18: "the transfer broke off",
    22: "the server says that it is not there or not allowed",
    28: "timed out",
    56: "the connection broke",
}
_OPEN_COMPRESSED: dict[bytes, Callable[[Any], Any]] = {b"\x1f\x8b": gzip.open, b"BZ": bz2.open, b"\xfd7": lzma.open}


@dataclass(frozen=True, slots=True)
class StreamedSample:
    """One sample with its bytes."""

    sample_id: int
    """The key, where it is nine digits as in shards of `fastdata shard`; else (shard + 1) * 2**40 + place in it."""
    label: int
    """Class index; 0 and of no meaning where no labels were asked for."""
    encoded: bytes
    """The picture as it lies in the shard."""
    shard: str
    """The shard's path or URL."""
    member: str
    """The picture's member name."""


@dataclass(frozen=True, slots=True)
class Lost:
    """A shard or sample that cannot be had."""

    error: ShardError
    """What is wrong with it."""
    shard: int
    """The shard's number."""
    sample_id: int = -1
    """The sample's id, -1 where it is a whole shard or the rest of one."""


@dataclass(frozen=True)
class HeldSamples:
    """Samples in memory, read by position like a source."""

    ids: NDArray[np.int64]
    """(n,) sample ids."""
    labels: NDArray[np.int64]
    """(n,) class indices."""
    encoded: tuple[bytes, ...]
    """The pictures."""
    places: tuple[tuple[str, str], ...]
    """Shard and member of each."""
    first: int = 0
    """Position of the first of them."""

    @classmethod
    def of(cls, samples: Sequence[StreamedSample]) -> HeldSamples:
        """Collect samples of a step."""
        return cls(
            np.fromiter((s.sample_id for s in samples), np.int64, len(samples)),
            np.fromiter((s.label for s in samples), np.int64, len(samples)),
            tuple(s.encoded for s in samples),
            tuple((s.shard, s.member) for s in samples),
        )

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.encoded)

    def part(self, start: int, stop: int) -> HeldSamples:
        """Return those at positions start..stop-1; they keep their positions."""
        return HeldSamples(
            self.ids[start:stop], self.labels[start:stop], self.encoded[start:stop], self.places[start:stop], start
        )

    def read(self, position: int) -> bytes:
        """Return the encoded bytes of one sample."""
        return self.encoded[position - self.first]

    def where(self, position: int) -> str:
        """Return the sample's place for messages."""
        shard, member = self.places[position - self.first]
        return f"{shard} member {member}"


@dataclass(frozen=True)
class ShardStream:
    """Shards to read from start to end. Immutable and picklable; every `read` opens its own connections."""

    root: str
    """What the user gave, for messages."""
    shards: tuple[str, ...]
    """Paths, URLs and commands, sorted as text; a shard's number is its place here."""
    wants_labels: bool = True
    """Whether every picture must have a label member."""
    length: int | None = None
    """Samples in all shards together, as the user says."""
    split: Split = "shards"
    """What ranks share: "shards" or "samples"; see `fastdata.WebDatasetOptions`."""
    kind: str = field(default="stream", init=False)
    """As in `fastdata.sources.IndexedSource`."""
    classes: tuple[str, ...] = field(default=(), init=False)
    """Streams carry class indices, not names."""

    @property
    def fingerprint(self) -> str:
        """Hex digest over the shards' names."""
        return hashlib.blake2b("\0".join(self.shards).encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()

    def read(
        self, shards: Sequence[int], side_by_side: int, ahead: int
    ) -> Generator[StreamedSample | Lost, None, None]:
        """Read shards, some at a time, in threads; close the generator to stop them.

        Args:
            shards: Numbers of shards, in order.
            side_by_side: Shards read at a time; one sample from each in turn.
            ahead: Further shards whose reading has begun.

        Yields:
            Samples and what was lost, in an order that depends on the arguments and the shards alone.
        """
        readers = [_ShardReader(self, shard) for shard in shards]
        return read_side_by_side(readers, side_by_side, ahead, _bytes_of)

    def close(self) -> None:
        """Do nothing: readers close with their generator."""


def open_stream(
    data: Any, labels: Any, *, allow_pipe: bool = False, length: int | None = None, split: Split = "shards"
) -> ShardStream:
    """Find out which shards are meant, without reading any.

    Args:
        data: A path, pattern, URL or ``pipe:`` command, or a list of these; ``{000..099}`` ranges are expanded.
        labels: "folders" (the label members) or None.
        allow_pipe: Whether ``pipe:`` commands may run.
        length: Samples in all shards together.
        split: What ranks share.

    Raises:
        UsageError: A label source that streams do not have, or a command that is not allowed.
        SourceError: Local shards are missing, one is named twice, or nothing can open such URLs here.
    """
    if labels is not None and labels != "folders":
        raise UsageError(
            "labels", f"{labels!r} for a stream", '"folders" (the label members of the shards) or None',
            "Convert the pictures with these labels: `fastdata shard`.",
        )  # fmt: skip
    items = [data] if isinstance(data, str | Path) else list(data)
    shards: list[str] = []
    for item in items:
        if is_url(item):
            _check_scheme(str(item), allow_pipe)
            shards += _expand_url(str(item))
            continue
        found, missing = list_shards(item)
        if missing:
            raise missing_shards_error(item, missing, len(found))
        shards += found
    shards.sort()
    for one, other in pairwise(shards):
        if one == other:
            raise SourceError(one, "named twice", "each shard once", "Its samples would come twice in every epoch.")
    root = str(data) if isinstance(data, str | Path) else f"{len(shards)} shards"
    return ShardStream(root, tuple(shards), labels is not None, length, split)


def _bytes_of(item: StreamedSample | Lost) -> int:
    return len(item.encoded) if isinstance(item, StreamedSample) else 0


def _split_name(name: str) -> tuple[str | None, str]:
    """Split at the last dot: keys may hold dots and folders, as in `fastdata`'s own index of foreign shards."""
    stem, dot, extension = name.rpartition(".")
    return (stem, extension) if dot else (None, "")


def _expand_url(url: str) -> list[str]:
    import braceexpand  # comes with webdataset, whose ranges these are

    try:
        return list(braceexpand.braceexpand(url, escape=False))  # a backslash in a command is the shell's
    except ValueError as exc:
        raise SourceError(url, str(exc), "a range such as {000000..000099}") from exc


def _check_scheme(url: str, allow_pipe: bool) -> None:
    from webdataset import gopen

    scheme = url.partition(":")[0].lower()
    if scheme == "pipe":
        if not allow_pipe:
            raise UsageError(
                "data", f"a command ({url})", "paths and URLs",
                "Allow commands with options=fastdata.WebDatasetOptions(allow_pipe=True), if you trust this one.",
            )  # fmt: skip
    elif gopen.gopen_schemes.get(scheme) is gopen.gopen_curl:
        if shutil.which("curl") is None:
            raise SourceError(url, f"curl, which reads {scheme}:// shards, is not installed", "", "Install curl.")
    elif scheme not in gopen.gopen_schemes:
        try:
            import fsspec

            fsspec.get_filesystem_class(scheme)
        except (ImportError, ValueError) as exc:
            raise SourceError(
                url, f"nothing here opens {scheme}:// ({exc})", "", "Install it: pip install 'fastdata[remote]' s3fs"
            ) from exc


class _TailKeeper:
    """A stream that remembers the end of what was read, to tell a whole archive from one that stops."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._previous = b""
        self._latest = b""
        self._total = 0

    def read(self, size: int) -> bytes:
        """Return up to `size` bytes; none at the end."""
        data: bytes = self._file.read(size)
        if data:
            self._previous, self._latest = self._latest, data
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
        kept = self._previous + self._latest
        rest = kept[end - (self._total - len(kept)) :]
        while len(rest) < tarfile.BLOCKSIZE and (more := self.read(tarfile.BLOCKSIZE)):
            rest += more
        if len(rest) < tarfile.BLOCKSIZE:
            found, expected = f"it ends at byte {end} without the archive's end mark", "a whole tar archive"
            raise ShardError(shard, found, expected, _REPAIR)
        while rest:
            if rest.strip(b"\0"):
                found = f"no tar header at byte {end}, and more behind it"
                raise ShardError(shard, found, "one whole tar archive", _REPAIR)
            rest = self.read(_READ_BYTES)


class _Beginning:
    """A stream whose first bytes were looked at already."""

    def __init__(self, start: bytes, file: Any) -> None:
        self._start = start
        self._file = file
        self.ended = False

    def read(self, size: int = -1) -> bytes:
        """Return up to `size` bytes; none at the end."""
        if self._start:
            data, self._start = self._start, b""
            return data
        data: bytes = self._file.read(size)
        self.ended = not data
        return data


@contextmanager
def _opened(url: str, reader: _ShardReader) -> Iterator[_TailKeeper]:
    """Open a shard wherever it lies; at the end, a command must have ended well.

    Raises:
        ShardError: The command or the connection failed.
    """
    handle = _open(url)
    reader.handle = handle
    command = handle if hasattr(handle, "proc") else None
    # Not Pipe.read: it throws away what a command wrote before it failed, or not, as the two processes happen to run.
    file = handle if command is None else command.stream
    try:
        if reader.stopped and command is not None:
            command.proc.kill()
        start = file.read(6)
        raw = _Beginning(start, file)
        opener = _OPEN_COMPRESSED.get(start[:2])
        try:
            yield _TailKeeper(raw if opener is None else opener(raw))
        except (*_BROKEN, ShardError):
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
    from webdataset import gopen

    if url.partition(":")[0].lower() in gopen.gopen_schemes:
        return gopen.gopen(url, "rb", bufsize=_READ_BYTES)
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


class _ShardReader:
    """Reads one shard, in a thread of `fastdata.sources.sidebyside`."""

    def __init__(self, stream: ShardStream, number: int) -> None:
        self._stream = stream
        self._number = number
        self._url = stream.shards[number]
        self.handle: Any = None
        self.stopped = False
        self._pictures = 0
        self._broken = False

    def stop(self) -> None:
        """End a read that waits, from another thread: a command is killed, a connection closed."""
        self.stopped = True
        handle = self.handle
        process = getattr(handle, "proc", None)
        if process is not None:
            process.kill()

    def __iter__(self) -> Iterator[StreamedSample | Lost]:
        """Yield the samples in the order in which they are complete, and what is lost."""
        problems: list[Lost] = []
        waiting: dict[str, tuple[int, str, bytes]] = {}
        labels: dict[str, tuple[str, bytes]] = {}
        complete: set[str] = set()
        for group in self._groups(problems):
            yield from self._take(group, waiting, labels, complete)
            yield from problems
            problems.clear()
        yield from problems
        if self._broken:
            return  # what is half because the shard is cut is no fault of its own
        for place, member, _ in waiting.values():
            yield self._lost("a picture without its label", "a .cls or .json member of the same key", member, place)
        for member, _ in labels.values():
            if member.lower().endswith(".cls"):
                yield self._lost("a label without its picture", "a picture of the same key", member)

    def _take(
        self,
        group: dict[str, Any],
        waiting: dict[str, tuple[int, str, bytes]],
        labels: dict[str, tuple[str, bytes]],
        complete: set[str],
    ) -> Iterator[StreamedSample | Lost]:
        """Make a sample of members that lie side by side and, where a part is missing, of parts seen before."""
        key = group["__key__"]
        pictures = [value for name, value in group.items() if name in IMAGE_EXTENSIONS]
        label = group.get("cls") or group.get("json")
        for member, data in pictures:
            if key in complete or key in waiting:
                yield self._lost("a second picture of the same key", "keys that come once in a shard", member)
            else:
                waiting[key] = self._pictures, member, data
            self._pictures += 1
        if label is not None and key not in complete:
            labels[key] = label
        if key in waiting and (key in labels or not self._stream.wants_labels):
            place, member, data = waiting.pop(key)
            complete.add(key)
            yield self._sample(key, place, member, data, labels.pop(key, None))
        elif len(waiting) > _PICTURES_WITHOUT_LABEL:
            place, member, _ = waiting.pop(next(iter(waiting)))
            yield self._lost(
                f"a picture without its label among the next {_PICTURES_WITHOUT_LABEL}",
                "a .cls or .json member of the same key beside it",
                member,
                place,
            )

    def _sample(
        self, key: str, place: int, member: str, data: bytes, label: tuple[str, bytes] | None
    ) -> StreamedSample | Lost:
        number = 0
        if self._stream.wants_labels and label is not None:
            found = parse_label(label[1])
            if found is None:
                text = label[1].decode("utf-8", "backslashreplace")[:60]
                return self._lost(f"the label {text!r}", LABEL_FORMAT, label[0], place, key)
            number = found
        return StreamedSample(self._id(key, place), number, data, self._url, member)

    def _id(self, key: str, place: int) -> int:
        return int(key) if _OWN_KEY.fullmatch(key) else ((self._number + 1) << 40) + place

    def _lost(self, found: str, expected: str, member: str = "", place: int | None = None, key: str = "") -> Lost:
        error = ShardError(self._url, found, expected, "" if member else _REPAIR, member=member)
        stem = key or member.rpartition(".")[0]
        return Lost(error, self._number, -1 if place is None else self._id(stem, place))

    def _groups(self, problems: list[Lost]) -> Iterator[dict[str, Any]]:
        """Yield what lies side by side under one key: a dict of lower-case extension to (member name, bytes)."""
        from webdataset.tariterators import group_by_keys

        def note(exc: Exception) -> bool:  # webdataset's handler: True goes on with the next member
            name = str(exc.args[0]).partition(":")[0] if exc.args else ""
            problems.append(self._lost("the same member comes twice", "each member once", name))
            return True

        yield from group_by_keys(self._members(problems), keys=_split_name, handler=note)

    def _members(self, problems: list[Lost]) -> Iterator[dict[str, Any]]:
        """Yield the wanted files of the archive; a fault that ends it goes to `problems`."""
        fault: ShardError | None = None
        try:
            with _opened(self._url, self) as file:
                yield from self._files_of(file)
        except ShardError as error:
            fault = error
        except _BROKEN as exc:
            fault = ShardError(self._url, str(exc) or type(exc).__name__, "a whole tar archive", _REPAIR)
        except ImportError as exc:
            raise SourceError(self._url, str(exc), "", "Install the package that reads such URLs.") from exc
        if fault is not None:
            self._broken = True
            problems.append(Lost(fault, self._number))

    def _files_of(self, file: _TailKeeper) -> Iterator[dict[str, Any]]:
        with tarfile.open(fileobj=cast("IO[bytes]", file), mode="r|", bufsize=_READ_BYTES) as tar:
            for info in tar:
                tar.members = []  # type: ignore[attr-defined]  # else every header of the shard stays in memory
                base = info.name.rpartition("/")[2]
                extension = base.rpartition(".")[2].lower()
                if not info.isreg() or base.startswith(".") or not self._wanted(extension):
                    continue
                content = tar.extractfile(info)
                assert content is not None
                yield {"fname": info.name, "data": (info.name, content.read()), "__url__": self._url}
            end = tar.offset
        file.check_end(end, self._url)

    def _wanted(self, extension: str) -> bool:
        return extension in IMAGE_EXTENSIONS or (self._stream.wants_labels and extension in LABEL_EXTENSIONS)
