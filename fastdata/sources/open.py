"""Decides what kind of source a user's `data` is: a folder of pictures, or shards."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from fastdata.errors import SourceError, UsageError
from fastdata.sources import IndexedSource
from fastdata.sources.folder import open_folder
from fastdata.sources.paths import is_image_name
from fastdata.sources.shardindex import INDEX_NAME
from fastdata.sources.shardlist import is_url
from fastdata.sources.tar import open_shards
from fastdata.spec import Labels

Data = str | Path | Sequence[str | Path]


def is_stream(data: Data) -> bool:
    """Tell whether `data` names URLs (or ``pipe:`` commands), which have no index and are read as a stream."""
    if isinstance(data, str | Path):
        return is_url(data)
    if not isinstance(data, Sequence):
        raise UsageError("data", f"{data!r}", "a folder of pictures, shards, or a list of shards")
    return any(is_url(item) for item in data)


def is_shards(data: Data) -> bool:
    """Tell whether `data` means local shards: a list, a pattern, a file, or a folder that holds ``.tar`` files."""
    if not isinstance(data, str | Path):
        return True
    if os.path.isdir(data):
        with os.scandir(data) as entries:
            return any(entry.name == INDEX_NAME or _is_shard_name(entry.name) for entry in entries)
    return os.path.isfile(data) or any(sign in str(data) for sign in "*?[{")


def open_source(
    data: Data, labels: Labels = "folders", *, allow_missing: bool = False, skip_damaged: bool = False
) -> IndexedSource:
    """Open a folder or shards.

    Args:
        data: A folder of class folders or pictures, a folder of shards, or what
            `fastdata.sources.shardlist.list_shards` takes.
        labels: Where labels come from.
        allow_missing: See `fastdata.sources.tar.open_shards`.
        skip_damaged: See `fastdata.sources.tar.open_shards`.

    Raises:
        SourceError: There is nothing that could be read.
        UsageError: `data` is a URL.
    """
    if is_stream(data):
        raise UsageError(
            "data", f"{data!r}, which has no index", "a folder or local shards", 'Streams need backend="webdataset".'
        )
    if isinstance(data, str | Path) and os.path.isfile(data) and is_image_name(os.fsencode(os.path.basename(data))):
        raise SourceError(str(data), "a picture", "a folder of pictures, or shards", "Name the folder that it lies in.")
    if is_shards(data):
        return open_shards(data, labels, allow_missing=allow_missing, skip_damaged=skip_damaged)
    assert isinstance(data, str | Path)
    splits = _splits(Path(data))
    if splits:
        raise SourceError(
            str(data),
            "a folder of converted splits (" + ", ".join(splits) + ")",
            "one of them",
            f"Open {os.path.join(data, splits[0])} instead.",
        )
    return open_folder(data, labels)


def _splits(folder: Path) -> list[str]:
    return sorted(path.parent.name for path in folder.glob(f"*/{INDEX_NAME}")) if folder.is_dir() else []


def _is_shard_name(name: str) -> bool:
    return name.endswith(".tar") and not name.startswith(".")
