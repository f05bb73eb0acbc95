"""Shards that are read from start to end because they have no index here: remote ones, pipes, or local ones on request.

The `webdataset` library opens URLs and groups members into samples, Python's `tarfile` reads the archives. What either
of them passes over in silence (a cut or damaged archive, half samples, a command that fails) becomes a `Lost` here.
"""

from __future__ import annotations

import hashlib
import re
import tarfile
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, Literal, cast

from fastdata.errors import ShardError, SourceError, UsageError
from fastdata.sources.opening import (
    BROKEN,
    READ_BYTES,
    REPAIR,
    Connection,
    TailKeeper,
    check_scheme,
    expand_url,
    opened,
)
from fastdata.sources.paths import IMAGE_EXTENSIONS
from fastdata.sources.shardlist import is_url, list_shards, missing_shards_error
from fastdata.sources.sidebyside import read_side_by_side
from fastdata.sources.streamed import Lost, StreamedSample
from fastdata.sources.tarscan import LABEL_EXTENSIONS, LABEL_FORMAT, parse_label
from fastdata.wording import counted

Split = Literal["shards", "samples"]

_OWN_KEY = re.compile(r"[0-9]{9}")
_PICTURES_WITHOUT_LABEL = 1000  # pictures of one shard that wait for their label before the shard is refused


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
            check_scheme(str(item), allow_pipe)
            shards += expand_url(str(item))
            continue
        found, missing = list_shards(item)
        if missing:
            raise missing_shards_error(item, missing, len(found))
        shards += found
    shards.sort()
    for one, other in pairwise(shards):
        if one == other:
            raise SourceError(one, "named twice", "each shard once", "Its samples would come twice in every epoch.")
    root = str(data) if isinstance(data, str | Path) else counted(len(shards), "shard")
    return ShardStream(root, tuple(shards), labels is not None, length, split)


def _bytes_of(item: StreamedSample | Lost) -> int:
    return len(item.encoded) if isinstance(item, StreamedSample) else 0


def _split_name(name: str) -> tuple[str | None, str]:
    """Split at the last dot: keys may hold dots and folders, as in `fastdata`'s own index of foreign shards."""
    stem, dot, extension = name.rpartition(".")
    return (stem, extension) if dot else (None, "")


class _ShardReader:
    """Reads one shard, in a thread of `fastdata.sources.sidebyside`."""

    def __init__(self, stream: ShardStream, number: int) -> None:
        self._stream = stream
        self._number = number
        self._url = stream.shards[number]
        self._connection = Connection()
        self._pictures = 0
        self._broken = False

    def stop(self) -> None:
        """End a read that waits, from another thread: a command is killed, a connection closed."""
        self._connection.stop()

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
        error = ShardError(self._url, found, expected, "" if member else REPAIR, member=member)
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
            with opened(self._url, self._connection) as file:
                yield from self._files_of(file)
        except ShardError as error:
            fault = error
        except BROKEN as exc:
            fault = ShardError(self._url, str(exc) or type(exc).__name__, "a whole tar archive", REPAIR)
        except ImportError as exc:
            raise SourceError(self._url, str(exc), "", "Install the package that reads such URLs.") from exc
        if fault is not None:
            self._broken = True
            problems.append(Lost(fault, self._number))

    def _files_of(self, file: TailKeeper) -> Iterator[dict[str, Any]]:
        with tarfile.open(fileobj=cast("IO[bytes]", file), mode="r|", bufsize=READ_BYTES) as tar:
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
