"""The index of a set of shards: what it holds for each sample and each shard, and how it lies in its file.

The converter writes one beside its shards; for shards of other writers one is made on first use and kept in a cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastdata.errors import ShardError
from fastdata.sources.arrayfile import read_array_file, write_array_file
from fastdata.sources.fingerprint import sample_fingerprint
from fastdata.sources.paths import PathTable

INDEX_NAME = "index.fastdata"
"""The index's file name; written last, so that its presence marks a finished set."""
CLASSES_NAME = "classes.json"
"""Class name to label, beside each index."""
WORK_NAME = ".fastdata-work"
"""The folder that holds unfinished work; its presence beside shards marks a set that is not finished."""
FORMAT_VERSION = 2
_NAMES_IN_FINGERPRINT = 2  # fingerprints of earlier versions cover the ids alone: reading makes the present kind

SAMPLE_COLUMNS: Mapping[str, type[np.generic]] = {
    "ids": np.int64,
    "shard": np.int32,
    "offset": np.int64,
    "size": np.int64,
    "labels": np.int64,
    "width": np.int32,
    "height": np.int32,
    "orientation": np.uint8,
    "crc32": np.uint32,
}
"""(n,) arrays, sorted by id: the sample's id, the shard's number, where the picture's bytes start in the shard and how
many they are, the class, width and height as stored (before the orientation is applied) in pixels, the Exif
orientation (1..8), and the CRC-32 of the picture's bytes."""


@dataclass(frozen=True)
class ShardInfo:
    """One shard."""

    name: str
    """File name in the set's folder; a full path in a cached index of other writers' shards."""
    size_bytes: int
    """Of the whole file."""
    samples: int
    """Number of samples in it."""
    sha256: str = ""
    """Hex digest of the whole file; "" where it was not made."""
    modified_ns: int = 0
    """Time stamp of the file; kept only in a cached index."""


@dataclass(frozen=True)
class ShardIndex:
    """Everything about a set of shards but the pictures."""

    shards: tuple[ShardInfo, ...]
    """In order of their numbers."""
    columns: Mapping[str, NDArray[Any]]
    """See `SAMPLE_COLUMNS`; a cached index of other writers' shards has no width, height, orientation and crc32, and no
    labels where none were asked for. Sets with re-encoded pictures also have ``source_sha256`` and ``stored_sha256``,
    (n, 32) uint8."""
    paths: PathTable
    """Original path of each sample below the folder it came from, or the name of the picture's member."""
    storage_order: NDArray[np.int64]
    """(n,) places of the samples in storage order: by shard, then by offset."""
    shard_starts: NDArray[np.int64]
    """(shards + 1,) where each shard starts in `storage_order`."""
    classes: tuple[str, ...]
    """Class names; the index of a name is its label."""
    fingerprint: str
    """Digest over ids and paths, as `fastdata.sources.fingerprint.sample_fingerprint` makes it."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """JSON-able: ``stored`` ("original", "resized" or "crop-ready"), ``options``, ``skipped``, ``ignored``."""
    digest: str = ""
    """sha256 over the file's arrays, filled in on reading."""
    file: Path | None = None
    """The file it was read from, so that other processes map it instead of getting a copy; None where it differs."""

    def __reduce__(self) -> tuple[Any, ...]:
        if self.file is not None:
            return _read_same, (self.file, self.digest, self.shards)
        return ShardIndex, tuple(getattr(self, item.name) for item in fields(self))

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.columns["ids"])


def write_index(path: Path, index: ShardIndex) -> None:
    """Write an index durably: it appears whole, after everything it speaks of."""
    header = {
        "kind": "fastdata shards",
        "version": FORMAT_VERSION,
        "samples": len(index),
        "fingerprint": index.fingerprint,
        "classes": list(index.classes),
        "shards": [[s.name, s.size_bytes, s.samples, s.sha256, s.modified_ns] for s in index.shards],
        **index.facts,
    }
    arrays = {
        **index.columns,
        "storage_order": index.storage_order,
        "shard_starts": index.shard_starts,
        "paths": index.paths.blob,
        "path_offsets": index.paths.offsets,
    }
    write_array_file(path, header, arrays)


_OWN_FIELDS = {
    "kind",
    "version",
    "samples",
    "fingerprint",
    "classes",
    "shards",
    "arrays",
    "file_bytes",
    "arrays_sha256",
}
_NOT_COLUMNS = {"storage_order", "shard_starts", "paths", "path_offsets"}


def read_index(path: Path) -> ShardIndex:
    """Map an index: its cost does not depend on the number of samples, but for the fingerprint of a version 1 index.

    Raises:
        SourceError: The file is missing, cut or damaged.
        ShardError: It is no index of shards, or of a later format version.
    """
    header, arrays = read_array_file(path)
    if header.get("kind") != "fastdata shards":
        raise ShardError(str(path), f"an index of {header.get('kind')!r}", "an index of shards")
    if header["version"] > FORMAT_VERSION:
        raise ShardError(
            str(path), f"format version {header['version']}", f"at most {FORMAT_VERSION}", "Upgrade fastdata."
        )
    paths = PathTable(arrays["paths"], arrays["path_offsets"])
    current = header["version"] >= _NAMES_IN_FINGERPRINT
    return ShardIndex(
        shards=tuple(ShardInfo(*entry) for entry in header["shards"]),
        columns={name: array for name, array in arrays.items() if name not in _NOT_COLUMNS},
        paths=paths,
        storage_order=arrays["storage_order"],
        shard_starts=arrays["shard_starts"],
        classes=tuple(header["classes"]),
        fingerprint=header["fingerprint"] if current else sample_fingerprint(arrays["ids"], paths),
        facts={name: value for name, value in header.items() if name not in _OWN_FIELDS},
        digest=header["arrays_sha256"],
        file=path,
    )


def _read_same(path: Path, digest: str, shards: tuple[ShardInfo, ...]) -> ShardIndex:
    index = read_index(path)
    if index.digest != digest:
        raise ShardError(
            str(path),
            "an index written since by another process",
            "the one this loader was opened with",
            "Open it again.",
        )
    return replace(index, shards=shards)


def storage_layout(
    shard: NDArray[np.int32], offset: NDArray[np.int64], shards: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return `ShardIndex.storage_order` and `ShardIndex.shard_starts` for samples at these places."""
    order = np.lexsort((offset, shard)).astype(np.int64)
    starts = np.zeros(shards + 1, np.int64)
    np.cumsum(np.bincount(shard, minlength=shards), out=starts[1:])
    return order, starts
