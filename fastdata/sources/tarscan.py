"""Shards that have no index: their tar headers, and the samples that the member names make.

Reads USTAR, GNU (long names) and PAX (path, size) archives. Everything that would lose a sample silently is a fault
with the shard's name: a cut archive, a picture without its label, a member that comes twice.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from fastdata.errors import ShardError
from fastdata.sources.mapping import map_file
from fastdata.sources.paths import IMAGE_EXTENSIONS, to_text

BLOCK = 512
_ZEROS = bytes(BLOCK)
_REGULAR = frozenset(b"\x0007")
LABEL_EXTENSIONS = ("cls", "json")
LABEL_FORMAT = "a decimal number, or JSON that holds one"
_JSON_KEYS = ("label", "cls", "class", "class_id", "class_index")
_PAX_RECORD = re.compile(rb"(\d+) ([^=]+)=")


@dataclass(frozen=True, slots=True)
class Member:
    """One regular file in a tar."""

    name: bytes
    """As stored, with folders."""
    offset: int
    """Bytes from the start of the tar to its first data byte."""
    size: int
    """Bytes of data."""


@dataclass(slots=True)
class ShardSamples:
    """The samples of one shard, in the order of their pictures' offsets."""

    names: list[bytes] = field(default_factory=list)
    """Member names of the pictures."""
    offsets: list[int] = field(default_factory=list)
    """Of the pictures' data, in bytes."""
    sizes: list[int] = field(default_factory=list)
    """Of the pictures, in bytes."""
    labels: list[int] = field(default_factory=list)
    """Class indices; empty where none were asked for."""
    ignored: Counter[str] = field(default_factory=Counter)
    """Members that belong to no sample, by kind."""
    faults: list[str] = field(default_factory=list)
    """What was skipped because it is damaged, as messages."""


def members(view: memoryview, shard: str) -> Iterator[Member]:
    """Yield the regular files of a tar in order.

    Raises:
        ShardError: The archive is cut, damaged, or no tar. What was yielded before is whole.
    """
    at, size = 0, len(view)
    long_name: bytes | None = None
    long_size: int | None = None
    if size == 0:
        raise ShardError(shard, "0 bytes", "a tar archive")
    while True:
        if at + BLOCK > size:
            raise ShardError(shard, f"it ends at byte {size} without the archive's end mark", "a whole tar archive",
                             "It is cut, or its writer did not finish.")  # fmt: skip
        header = bytes(view[at : at + BLOCK])
        if header == _ZEROS:
            _check_end(view, at, shard)
            return
        _check_header(header, at, shard)
        kind = header[156]
        own = long_size is None or kind in b"LxgK"
        length = _number(header[124:136], shard) if own else int(long_size or 0)
        start = at + BLOCK
        if start + length > size:
            raise ShardError(
                shard,
                f"it ends at byte {size}, inside a member",
                f"at least {start + length} bytes",
                "The shard is cut: copy or make it again.",
                member=to_text(long_name or _name(header)),
            )
        if kind in b"LxgK":
            data = bytes(view[start : start + length])
            if kind == ord("L"):
                long_name = data.rstrip(b"\0")
            elif kind == ord("x"):
                records = dict(_pax_records(data))
                long_name = records.get(b"path", long_name)
                long_size = int(records[b"size"]) if b"size" in records else None
            at = start + _padded(len(data))
            continue
        if kind in _REGULAR:
            yield Member(long_name or _name(header), start, length)
        long_name = long_size = None
        at = start + _padded(length)


def scan_shard(path: str, *, want_labels: bool, skip_damaged: bool) -> ShardSamples:
    """Find the samples of one shard.

    A sample is a picture and the ``.cls`` or ``.json`` member of the same key, wherever the two lie in the shard. The
    key is the name up to its last dot. Labels are decimal numbers, or JSON: a number, or an object with one under
    ``label``, ``cls``, ``class``, ``class_id`` or ``class_index``.

    Args:
        path: The shard.
        want_labels: Whether each picture must have a label.
        skip_damaged: Take the whole samples of a damaged shard and list the rest in `ShardSamples.faults`.

    Raises:
        ShardError: The shard is damaged, a member comes twice, or a sample is not complete; names shard and member.
    """
    try:
        view, _ = map_file(path)
    except OSError as exc:
        raise ShardError(path, exc.strerror or str(exc), "a readable shard") from exc
    found = ShardSamples()
    pictures: dict[bytes, Member] = {}
    labels: dict[bytes, Member] = {}
    with _faults_of(found, skip_damaged):
        for member in members(view, path):
            _sort_in(member, path, pictures, labels, found)
    for key, picture in pictures.items():
        label = labels.pop(key, None)
        with _faults_of(found, skip_damaged):
            if want_labels:
                found.labels.append(_read_label(view, picture, label, path))
            found.names.append(picture.name)
            found.offsets.append(picture.offset)
            found.sizes.append(picture.size)
    for label in labels.values():
        if not label.name.lower().endswith(b".cls"):
            found.ignored["members without a picture"] += 1
            continue
        with _faults_of(found, skip_damaged):
            raise ShardError(
                path, "a label without its picture", "a picture of the same key", member=to_text(label.name)
            )
    return found


@contextmanager
def _faults_of(found: ShardSamples, skip_damaged: bool) -> Iterator[None]:
    """Let an error pass, or note it where damage is skipped."""
    try:
        yield
    except ShardError as error:
        if not skip_damaged:
            raise
        found.faults.append(str(error))


def parse_label(data: bytes) -> int | None:
    """Return the class index that a ``.cls`` or ``.json`` member holds, or None where it holds none.

    A decimal number, or JSON: an int, or an object with one under label, cls, class, class_id or class_index.
    """
    text = data.decode("utf-8", "backslashreplace").strip()
    if text.isascii() and text.removeprefix("-").isdigit():
        return int(text)
    try:
        value: Any = json.loads(text)
    except ValueError:
        return None
    if isinstance(value, dict):
        value = next((value[key] for key in _JSON_KEYS if key in value), None)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def member_name(view: memoryview, data_offset: int) -> str:
    """Return the name in the header before a member's data, for messages."""
    return to_text(_name(bytes(view[data_offset - BLOCK : data_offset])))


def _sort_in(
    member: Member, shard: str, pictures: dict[bytes, Member], labels: dict[bytes, Member], found: ShardSamples
) -> None:
    folder, slash, base = member.name.rpartition(b"/")
    stem, dot, extension = base.rpartition(b".")
    kind = extension.decode("latin-1").lower()
    if base.startswith(b".") or not dot:
        found.ignored["hidden or without extension"] += 1
        return
    if kind in IMAGE_EXTENSIONS:
        table = pictures
    elif kind in LABEL_EXTENSIONS:
        table = labels
    else:
        found.ignored[f".{kind}"] += 1
        return
    key = folder + slash + stem
    other = table.get(key)
    if other is not None:
        if table is labels and other.name.lower() != member.name.lower():
            if kind == "cls":  # a .cls wins over the .json of the same sample
                table[key] = member
            return
        what = (
            "the same member" if other.name == member.name else f"a second member of the sample ({to_text(other.name)})"
        )
        raise ShardError(shard, f"{what} comes twice", "each member once", member=to_text(member.name))
    table[key] = member


def _read_label(view: memoryview, picture: Member, label: Member | None, shard: str) -> int:
    if label is None:
        raise ShardError(
            shard,
            "a picture without its label",
            "a .cls or .json member of the same key",
            "In Python: labels=None reads pictures alone.",
            member=to_text(picture.name),
        )
    data = bytes(view[label.offset : label.offset + label.size])
    value = parse_label(data)
    if value is None:
        found = f"the label {data.decode('utf-8', 'backslashreplace').strip()[:60]!r}"
        raise ShardError(shard, found, LABEL_FORMAT, member=to_text(label.name))
    return value


def _check_end(view: memoryview, at: int, shard: str) -> None:
    rest = len(view) - at
    block = 1 << 20
    for start in range(at, len(view), block):
        if bytes(view[start : start + block]).strip(b"\0"):
            raise ShardError(shard, f"an end mark at byte {at} with {rest} bytes after it that are not empty",
                             "one tar archive", "It is damaged, or several archives were joined.")  # fmt: skip


def _check_header(header: bytes, at: int, shard: str) -> None:
    try:
        expected = _number(header[148:156], shard)
    except ShardError:
        expected = -1
    if sum(header) - sum(header[148:156]) + 8 * 32 != expected:
        raise ShardError(shard, f"no tar header at byte {at}", "a tar archive", "It is damaged, or no tar.")


def _number(octets: bytes, shard: str) -> int:
    if octets[0] & 0x80:  # GNU and star write numbers past eight octal digits in base 256
        return int.from_bytes(octets, "big") & ((1 << (8 * len(octets) - 1)) - 1)
    text = octets.strip(b" \0")
    try:
        return int(text, 8) if text else 0
    except ValueError as exc:
        raise ShardError(shard, f"the number {octets!r} in a header", "octal digits") from exc


def _name(header: bytes) -> bytes:
    name = header[:100].partition(b"\0")[0]
    if header[257:263] == b"ustar\0":
        prefix = header[345:500].partition(b"\0")[0]
        if prefix:
            return prefix + b"/" + name
    return name


def _pax_records(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    at = 0
    while match := _PAX_RECORD.match(data, at):
        end = at + int(match.group(1))
        yield match.group(2), data[match.end() : end - 1]
        at = end


def _padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK
