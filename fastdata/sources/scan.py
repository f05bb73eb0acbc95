"""One pass over a folder's names, and the cache that makes the next pass cheap."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fastdata.errors import SourceError
from fastdata.progress import counter
from fastdata.sources.arrayfile import read_array_file, write_array_file
from fastdata.sources.paths import SYSTEM_NAMES, PathTable, is_image_name, printable, to_text

CACHE_FROM_FILES = 50_000
"""Smaller folders are scanned anew each time: it takes a tenth of a second and leaves nothing behind."""
_SETTLED_S = 2.0  # coarsest time stamps of common file systems (FAT); younger changes could hide behind an equal stamp
_VERSION = 1


@dataclass(frozen=True)
class FolderScan:
    """What one pass found."""

    paths: PathTable
    """Relative paths of all pictures, sorted by bytes."""
    labels: NDArray[np.int64]
    """(n,) int64 place of each picture's class in `classes`; empty without class folders."""
    classes: tuple[str, ...]
    """Names of the class folders, sorted as text; empty without class folders."""
    ignored: Mapping[str, int]
    """Number of files (and of hidden or system folders) that were left out, by kind."""
    cache_file: Path | None = None
    """Where the scan is kept, so that other processes map it instead of getting a copy."""
    digest: str = ""
    """Of the kept scan, so that another process never gets a newer one than this."""

    def __reduce__(self) -> tuple[Any, ...]:
        if self.cache_file is not None:
            return _load_same, (self.cache_file, self.digest)
        return FolderScan, (self.paths, self.labels, self.classes, self.ignored)


@dataclass
class _Walk:
    """What a pass gathers on its way."""

    ignored: Counter[str] = field(default_factory=Counter)
    folders: list[tuple[bytes, int]] = field(default_factory=list)
    """Relative path and time stamp (ns) of each folder, before it was listed."""
    dangling: int = 0
    """Links that lead nowhere now; they may later, without a trace in any time stamp."""


def scan_folder(
    root: bytes, *, class_folders: bool, cache_dir: str | Path | Literal["auto"] | None = "auto"
) -> FolderScan:
    """List the pictures below a folder, from the cache where nothing changed since.

    Args:
        root: The folder.
        class_folders: Whether folders in `root` are classes; pictures directly in `root` are then left out and counted.
        cache_dir: See `fastdata.sources.folder.open_folder`.

    Raises:
        SourceError: A folder cannot be listed.
    """
    cache_file = _cache_file(root, class_folders, cache_dir)
    if cache_file is not None and (kept := _unchanged(root, cache_file)) is not None:
        return kept
    started_ns = time.time_ns()
    walk = _Walk()
    with counter("Listing pictures", "files") as advance:
        scan = _collect(root, class_folders, walk, advance)
    newest_ns = max(stamp for _, stamp in walk.folders)
    settled = newest_ns < started_ns - _SETTLED_S * 1e9 and not walk.dangling
    if cache_file is None or len(scan.paths) < CACHE_FROM_FILES or not settled:
        return scan
    try:
        _keep(scan, walk, cache_file)
    except OSError:  # a cache folder that cannot be written costs time later, and nothing else
        return scan
    return _load(cache_file)


def user_cache_dir() -> Path:
    """Return the folder for this user's caches of fastdata."""
    if sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "fastdata"


def _collect(root: bytes, class_folders: bool, walk: _Walk, advance: Callable[[int], None]) -> FolderScan:
    blobs: list[bytes] = []
    lengths: list[NDArray[np.int64]] = []
    counts: dict[bytes, int] = {}
    for prefix, names in _runs(root, walk):
        if class_folders and not prefix:
            if names:
                walk.ignored["pictures outside class folders"] += len(names)
            continue
        if class_folders:
            top = prefix.partition(b"/")[0]
            counts[top] = counts.get(top, 0) + len(names)
        blobs.append(b"".join([prefix + name for name in names]))
        lengths.append(np.fromiter(map(len, names), np.int64, len(names)) + len(prefix))
        advance(len(names))
    texts = [to_text(name) for name in counts]
    classes = tuple(sorted(texts))
    place = {name: number for number, name in enumerate(classes)}
    labels = np.repeat(
        np.array([place[text] for text in texts], np.int64), np.array(list(counts.values()), np.int64)
    )  # classes come in the order of their paths' bytes, each in one piece
    return FolderScan(PathTable.from_parts(blobs, lengths), labels, classes, dict(walk.ignored))


def _runs(root: bytes, walk: _Walk) -> Iterator[tuple[bytes, list[bytes]]]:
    """Yield (prefix, names) so that ``prefix + name`` come sorted by bytes over all; each folder has at least one."""
    pending: list[tuple[bytes, list[bytes] | None, frozenset[tuple[int, int]]]] = [(b"", None, frozenset())]
    while pending:
        prefix, names, parents = pending.pop()
        if names is not None:
            yield prefix, names
            continue
        path = root + b"/" + prefix
        try:
            found = os.stat(path)
            identity = (found.st_dev, found.st_ino)
            if identity in parents:
                walk.ignored["folders that contain themselves"] += 1
                continue
            walk.folders.append((prefix, found.st_mtime_ns))
            files, folders = _list(path, walk)
        except OSError as exc:
            raise SourceError(printable(path), exc.strerror or str(exc), "a folder that can be listed") from exc
        inside = parents | {identity}
        yield prefix, []
        runs = _merge(prefix, files, folders)
        pending.extend((start, run, inside) for start, run in reversed(runs))


def _merge(prefix: bytes, files: list[bytes], folders: list[bytes]) -> list[tuple[bytes, list[bytes] | None]]:
    """Put a folder's files and sub-folders in the order of their paths: ``a.jpg`` sorts before ``a/``."""
    files.sort()
    if not folders:
        return [(prefix, files)] if files else []
    runs: list[tuple[bytes, list[bytes] | None]] = []
    at = 0
    for folder in sorted(name + b"/" for name in folders):
        stop = at
        while stop < len(files) and files[stop] < folder:
            stop += 1
        if stop > at:
            runs.append((prefix, files[at:stop]))
        runs.append((prefix + folder, None))
        at = stop
    if at < len(files):
        runs.append((prefix, files[at:]))
    return runs


def _list(path: bytes, walk: _Walk) -> tuple[list[bytes], list[bytes]]:
    files: list[bytes] = []
    folders: list[bytes] = []
    with os.scandir(path) as entries:
        for entry in entries:
            name = entry.name
            if name.startswith(b"."):
                walk.ignored["hidden"] += 1
            elif name.lower() in SYSTEM_NAMES:
                walk.ignored["system files"] += 1
            elif entry.is_dir():
                folders.append(name)
            elif not is_image_name(name):
                walk.ignored["not pictures"] += 1
            elif entry.is_file():
                files.append(name)
            elif entry.is_symlink():  # kept: leaving it out would lose a sample silently; reading it names the path
                files.append(name)
            else:
                walk.ignored["pipes, sockets and devices"] += 1
            if entry.is_symlink() and not os.path.exists(path + b"/" + name):
                walk.dangling += 1
    return files, folders


def _cache_file(root: bytes, class_folders: bool, cache_dir: str | Path | Literal["auto"] | None) -> Path | None:
    if cache_dir is None:
        return None
    base = user_cache_dir() if cache_dir == "auto" else Path(cache_dir)
    key = hashlib.blake2b(os.path.realpath(root), digest_size=16, person=b"folder scan")
    key.update(bytes([_VERSION, class_folders]))
    return base / "folders" / f"{key.hexdigest()}.index"


def _keep(scan: FolderScan, walk: _Walk, cache_file: Path) -> None:
    cache_file.parent.mkdir(parents=True, exist_ok=True)
    folders = PathTable.from_paths([path for path, _ in walk.folders])
    arrays = {
        "paths": scan.paths.blob,
        "path_offsets": scan.paths.offsets,
        "labels": scan.labels,
        "folders": folders.blob,
        "folder_offsets": folders.offsets,
        "folder_stamps_ns": np.array([stamp for _, stamp in walk.folders], np.int64),
    }
    header = {"kind": "folder scan", "version": _VERSION, "classes": scan.classes, "ignored": scan.ignored}
    write_array_file(cache_file, header, arrays, durable=False)


def _load(cache_file: Path) -> FolderScan:
    header, arrays = read_array_file(cache_file)
    paths = PathTable(arrays["paths"], arrays["path_offsets"])
    return FolderScan(
        paths, arrays["labels"], tuple(header["classes"]), header["ignored"], cache_file, header["arrays_sha256"]
    )


def _load_same(cache_file: Path, digest: str) -> FolderScan:
    scan = _load(cache_file)
    if scan.digest != digest:
        raise SourceError(
            str(cache_file), "an index made since by another process", "the one this loader was opened with",
            "The folder changed while it was in use: open it again.",
        )  # fmt: skip
    return scan


def _unchanged(root: bytes, cache_file: Path) -> FolderScan | None:
    """Return the kept scan if every folder in it still has its time stamp: adding, removing or renaming changes it."""
    try:
        _, arrays = read_array_file(cache_file)
        folders = PathTable(arrays["folders"], arrays["folder_offsets"])
        for path, stamp in zip(folders, arrays["folder_stamps_ns"].tolist(), strict=True):
            if os.stat(root + b"/" + path).st_mtime_ns != stamp:
                return None
    except (OSError, SourceError):
        return None
    return _load(cache_file)
