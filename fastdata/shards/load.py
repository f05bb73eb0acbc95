"""One sample on its way into a shard: read, checked, re-encoded where asked, hashed. Runs in worker threads."""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass

from fastdata.errors import DecodeError, FastDataError, SourceError
from fastdata.shards.facts import PictureFacts, read_facts
from fastdata.shards.options import ConvertOptions
from fastdata.shards.tarformat import MAX_MEMBER_BYTES, archive_bytes, sample_bytes
from fastdata.sources.folder import FolderSource

Transcode = Callable[[bytes, PictureFacts], bytes | None]
"""Returns the new bytes of a picture, or None where it stays as it is."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A sample that is ready to be stored."""

    position: int
    """In the source."""
    data: bytes
    """What is stored."""
    facts: PictureFacts
    """Of `data`."""
    crc32: int
    """Of `data`."""
    source_sha256: bytes
    """Of the file; empty where files are stored as they are."""
    stored_sha256: bytes
    """Of `data`; empty where files are stored as they are."""
    stored_bytes: int
    """Length of `data`; kept when the data themselves are let go."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A sample that cannot be stored."""

    position: int
    """In the source."""
    error: FastDataError
    """Names the path and the reason."""


def load_sample(
    source: FolderSource, position: int, options: ConvertOptions, transcode: Transcode | None
) -> Loaded | Refused:
    """Read one file and make what a shard stores of it. Never raises for what the file holds."""
    try:
        # Before reading: a file that no shard can hold may not fit into memory either.
        _check_size(source, position, os.stat(source.path(position)).st_size, options, transcode is not None)
        original = source.read(position)
        facts = read_facts(original)
        data = transcode(original, facts) if transcode is not None else None
        if data is None:
            data = original
        else:
            facts = read_facts(data)
        _check_size(source, position, len(data), options, False)
    except DecodeError as error:
        return Refused(position, SourceError(source.where(position), error.found, error.expected, error.remedy))
    except OSError as exc:
        return Refused(position, SourceError(source.where(position), exc.strerror or str(exc), "a readable file"))
    except FastDataError as error:
        return Refused(position, error)
    both = transcode is not None
    return Loaded(
        position,
        data,
        facts,
        zlib.crc32(data),
        hashlib.sha256(original).digest() if both else b"",
        hashlib.sha256(data).digest() if both else b"",
        len(data),
    )


def make_transcode(options: ConvertOptions) -> Transcode | None:
    """Return what re-encodes pictures as the options ask, or None where they are stored as they are."""
    if options.resize is not None:
        from fastdata.shards.resize import Resizer

        return Resizer(options.resize, options.quality)
    return None


def _check_size(source: FolderSource, position: int, size: int, options: ConvertOptions, may_change: bool) -> None:
    needed = archive_bytes(sample_bytes(size))
    if size > MAX_MEMBER_BYTES or (needed > options.max_bytes and not may_change):
        raise SourceError(
            source.where(position),
            f"{size} bytes, which make a shard of {needed}",
            f"a shard of at most {options.max_bytes} bytes",
            "Raise --max-bytes, or skip the file with --on-error skip.",
        )
