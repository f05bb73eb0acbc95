"""Samples on their way into a shard: read, checked, re-encoded where asked, hashed. Runs in worker threads.

A file is read straight to its place among the tar's bytes, so that it is copied once from the system's cache and once
back: at a gigabyte a second each further copy costs as much as the reading.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fastdata.errors import DecodeError, FastDataError, SourceError
from fastdata.shards.facts import PictureFacts, read_facts
from fastdata.shards.options import ConvertOptions
from fastdata.shards.reencode import Reencode
from fastdata.shards.tarformat import (
    BLOCK,
    MAX_MEMBER_BYTES,
    archive_bytes,
    header,
    label_parts,
    sample_bytes,
    sample_key,
)
from fastdata.sources.folder import FolderSource

_SEGMENT_BYTES = 1 << 20  # about what a core's own cache holds


@dataclass(frozen=True, slots=True)
class Loaded:
    """A sample that is ready to be stored: ``segment[start:stop]`` are its members, headers and padding included."""

    position: int
    """In the source."""
    segment: memoryview
    """Bytes of several samples, one after another."""
    start: int
    """Where the sample's members start in `segment`."""
    stop: int
    """Where they end."""
    data_bytes: int
    """Of the stored picture."""
    facts: PictureFacts
    """Of the stored picture."""
    crc32: int
    """Of the stored picture."""
    source_sha256: bytes = b""
    """Of the file; empty where files are stored as they are."""
    stored_sha256: bytes = b""
    """Of the stored picture; empty where files are stored as they are."""
    note: str = ""
    """What re-encoding did, or why nothing; "" where files are stored as they are."""
    not_crop_ready: str = ""
    """Why it could not be made crop-ready; "" where it is, or where that was not asked for."""
    stamp: tuple[int, int] = (-1, -1)
    """Of the file before it was read, see `fastdata.sources.folder.FolderSource.stamp`."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A sample that cannot be stored."""

    position: int
    """In the source."""
    error: FastDataError
    """Names the path and the reason. The remedy is empty where it is the same for all bad files."""
    stamp: tuple[int, int] = (-1, -1)
    """As in `Loaded`."""


class Loader:
    """Loads runs of samples. Immutable, so threads share it."""

    def __init__(
        self, source: FolderSource, labels: NDArray[np.int64], options: ConvertOptions, reencode: Reencode | None
    ) -> None:
        """Take what is the same for all samples.

        Args:
            source: Where they come from.
            labels: (n,) label of each position.
            options: What shards hold.
            reencode: Makes the stored picture; None: files are stored as they are.
        """
        self._source, self._labels, self._max_bytes, self._reencode = source, labels, options.max_bytes, reencode

    def load(self, positions: Sequence[int]) -> list[Loaded | Refused]:
        """Load some samples. Never raises for what their files hold."""
        room = _Room()
        # A file that changes while it is read has another stamp later than before.
        return [
            replace(self._load_one(position, room), stamp=stamp)
            for position, stamp in ((position, self._source.stamp(position)) for position in positions)
        ]

    def _load_one(self, position: int, room: _Room) -> Loaded | Refused:
        source = self._source
        try:
            if self._reencode is None:
                data = source.read_into(position, lambda size: room.take(self._checked(position, size)))
                return self._stored(position, room, data, read_facts(data))
            return self._reencoded(position, room, self._reencode)
        except DecodeError as error:
            return Refused(position, SourceError(source.where(position), error.found, error.expected))
        except FastDataError as error:
            return Refused(position, error)

    def _reencoded(self, position: int, room: _Room, reencode: Reencode) -> Loaded:
        original = self._source.read(position)
        facts = read_facts(original)
        made = reencode(original, facts)
        data = original if made.data is None else made.data
        if made.data is not None:
            facts = read_facts(data)
        place = room.take(self._checked(position, len(data)))
        place[:] = data
        digests = hashlib.sha256(original).digest(), hashlib.sha256(data).digest()
        stored = self._stored(position, room, place, facts, *digests)
        return replace(stored, note=made.note, not_crop_ready=made.not_crop_ready)

    def _stored(
        self,
        position: int,
        room: _Room,
        data: memoryview,
        facts: PictureFacts,
        source_sha256: bytes = b"",
        stored_sha256: bytes = b"",
    ) -> Loaded:
        """Put headers, padding and label around a picture that lies in its place."""
        key = sample_key(int(self._source.ids[position]))
        before = header(f"{key}.{facts.extension}", len(data))
        after = label_parts(key, len(data), int(self._labels[position]))
        segment, start, stop = room.close(before, len(data), after)
        crc32 = zlib.crc32(data)
        return Loaded(position, segment, start, stop, len(data), facts, crc32, source_sha256, stored_sha256)

    def _checked(self, position: int, size: int) -> int:
        """Return `size`, or refuse a picture that no shard can hold, before it is read."""
        needed = archive_bytes(sample_bytes(size))
        if size > MAX_MEMBER_BYTES or needed > self._max_bytes:
            raise SourceError(
                self._source.where(position),
                f"{size} bytes, which make a shard of {needed}",
                f"a shard of at most {self._max_bytes} bytes",
                'Raise --max-bytes, or skip the file: --on-error skip (in Python: on_error="skip").',
            )
        return size


class _Room:
    """Memory for samples, one after another in segments."""

    def __init__(self) -> None:
        self._segment = memoryview(b"")
        self._at = 0

    def take(self, data_bytes: int) -> memoryview:
        """Return the place of a picture: behind its header, with room for its padding and label."""
        needed = sample_bytes(data_bytes)
        if self._at + needed > len(self._segment):
            self._segment = memoryview(np.empty(max(needed, _SEGMENT_BYTES), np.uint8))  # type: ignore[arg-type]
            self._at = 0
        start = self._at + BLOCK
        return self._segment[start : start + data_bytes]

    def close(self, before: bytes, data_bytes: int, after: bytes) -> tuple[memoryview, int, int]:
        """Write what surrounds the picture that was put in its place, and return segment, start and stop of it all."""
        start = self._at
        self._segment[start : start + BLOCK] = before
        tail = start + BLOCK + data_bytes
        self._at = tail + len(after)
        self._segment[tail : self._at] = after
        return self._segment, start, self._at
