"""The folder source: an index of the pictures in a folder, sorted by the bytes of their relative paths.

A sample's id is its place in that order, whatever the labels are. Sub-folders of a class folder belong to the class,
links are followed (a folder that contains itself is entered once), hidden files, files that operating systems leave
behind and everything that is not named like a picture are ignored and counted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fastdata.errors import SourceError, UsageError
from fastdata.order import ShardLayout
from fastdata.sources import Encoded
from fastdata.sources.fingerprint import sample_fingerprint
from fastdata.sources.labels import LabelArray, labels_from_callable, labels_from_csv, text_paths
from fastdata.sources.paths import PathTable, printable
from fastdata.sources.scan import FolderScan, scan_folder
from fastdata.spec import Labels
from fastdata.wording import counted

_SPLIT_NAMES = frozenset(("train", "val", "valid", "validation", "test"))


def open_folder(
    root: str | Path, labels: Labels = "folders", *, cache_dir: str | Path | Literal["auto"] | None = "auto"
) -> FolderSource:
    """Index a folder of pictures.

    Args:
        root: The folder.
        labels: ``"folders"``: each folder in `root` is a class, named as the folder; labels are places in the class
            names sorted as text. A CSV file (see `fastdata.sources.labels.labels_from_csv`). A callable on each full
            path. None: no labels.
        cache_dir: Where the index of a large folder is kept; "auto": the user's cache folder. None: nowhere. A kept
            index is used only while no folder in it has changed.

    Raises:
        SourceError: The folder is missing or holds no picture, a class has none, or labels cannot be had.
        UsageError: Its folders are splits, not classes.
    """
    root = Path(root)
    if not root.exists():
        raise SourceError(str(root), "no such folder", "a folder of pictures")
    if not root.is_dir():
        raise SourceError(str(root), "a file", "a folder of pictures")
    class_folders = isinstance(labels, str) and labels == "folders"
    scan = scan_folder(os.fsencode(root), class_folders=class_folders, cache_dir=cache_dir)
    if not len(scan.paths):
        raise _nothing_found(root, scan, class_folders)
    ids, classes = np.arange(len(scan.paths), dtype=np.int64), scan.classes
    values: LabelArray | None = None
    ignored = dict(scan.ignored)
    if class_folders:
        refuse_splits(root, scan)
        _check_classes(root, scan)
        values = scan.labels
    elif isinstance(labels, str | Path):
        ids, values, classes = labels_from_csv(Path(labels), scan.paths)
        if len(ids) < len(scan.paths):
            ignored["not in the label file"] = len(scan.paths) - len(ids)
    elif callable(labels):
        values, classes = labels_from_callable(labels, text_paths(os.fsencode(root), scan.paths))
    elif labels is not None:
        raise UsageError("labels", f"{labels!r}", '"folders", a CSV file, a callable on the path, or None')
    return FolderSource(root, scan, ids, values, classes, ignored)


def refuse_splits(root: Path, scan: FolderScan) -> None:
    """Refuse a folder of splits that hold class folders: train and val would pass for two classes.

    Args:
        root: The folder.
        scan: All its pictures, with class folders.

    Raises:
        UsageError: There is a "train" with sub-folders of pictures, and the other folders are named like splits too.
    """
    names = scan.classes
    if "train" not in names or len(names) < 2 or not _SPLIT_NAMES.issuperset(names):
        return
    train = names.index("train")
    of_train = (path for path, label in zip(scan.paths, scan.labels.tolist(), strict=True) if label == train)
    if any(path.count(b"/") > 1 for path in of_train):
        raise UsageError(
            str(root),
            f"the folders {', '.join(names)}, with folders of pictures in train: splits, not classes",
            "one split",
            f"Pass {root / 'train'}. Should these be classes after all, in Python: labels= a function on the path.",
        )


def _check_classes(root: Path, scan: FolderScan) -> None:
    counts = np.bincount(scan.labels, minlength=len(scan.classes))
    empty = [name for name, count in zip(scan.classes, counts, strict=True) if count == 0]
    if empty:
        more = f" (and {counted(len(empty) - 1, 'more such class')}: {', '.join(empty[1:6])})" if len(empty) > 1 else ""
        raise SourceError(
            str(root / empty[0]),
            f"a class folder without pictures{more}",
            "at least one picture in each class",
            "Remove the folder, or add its pictures: leaving it out silently would move all later labels.",
        )


def _nothing_found(root: Path, scan: FolderScan, class_folders: bool) -> SourceError:
    ignored = ", ".join(f"{count} {kind}" for kind, count in scan.ignored.items())
    if class_folders and scan.ignored.get("pictures outside class folders"):
        return SourceError(
            str(root),
            f"no class folders ({ignored})",
            "one folder for each class",
            "Move the pictures into such folders. In Python: labels=None, a CSV file or a function on the path.",
        )
    if class_folders and scan.classes:
        _check_classes(root, scan)
    return SourceError(
        str(root), f"no pictures ({'it is empty' if not ignored else 'ignored: ' + ignored})", "pictures"
    )


class FolderSource:
    """The pictures of a folder as an `fastdata.sources.IndexedSource`. Make it with `open_folder`."""

    kind = "folder"
    layout: ShardLayout | None = None
    faults: tuple[str, ...] = ()

    def __init__(
        self,
        root: Path,
        scan: FolderScan,
        ids: NDArray[np.int64],
        labels: NDArray[np.int64] | NDArray[np.float32] | None,
        classes: tuple[str, ...],
        ignored: Mapping[str, int],
    ) -> None:
        """Join a scan and labels.

        Args:
            root: The folder.
            scan: All its pictures; a sample's path is ``scan.paths[id]``.
            ids: (n,) int64 ascending ids of the samples.
            labels: (n,) int64, (n, k) float32 or None.
            classes: Class names.
            ignored: What was left out: number of files by kind.
        """
        self.root = str(root)
        self.ids = ids
        self.labels = labels
        self.classes = classes
        self.ignored = ignored
        self._scan = scan
        self._prefix = os.path.join(os.fsencode(root), b"")
        self.fingerprint = sample_fingerprint(ids, scan.paths if len(ids) == len(scan.paths) else scan.paths.take(ids))

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.ids)

    def relative_path(self, position: int) -> bytes:
        """Return the path of one sample below `root`, with ``/``."""
        return self._scan.paths[int(self.ids[position])]

    def path(self, position: int) -> bytes:
        """Return the path of one sample as the system takes it."""
        return self._prefix + self.relative_path(position)

    @property
    def relative_paths(self) -> PathTable:
        """Relative paths by id."""
        return self._scan.paths

    def stamp(self, position: int) -> tuple[int, int]:
        """Return size in bytes and time of the last change in ns of one file; -1, -1 where it cannot be looked at."""
        try:
            found = os.stat(self.path(position))
        except OSError:
            return -1, -1
        return found.st_size, found.st_mtime_ns

    def read(self, position: int) -> bytes:
        """Return the bytes of one file: one open, one stat, one read, one close."""
        path = self.path(position)
        try:
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                size = os.fstat(handle).st_size
                data = os.read(handle, size)
                if len(data) < size:  # a read returns 2 GiB at most, and less on a signal or a network file system
                    data = _read_on(handle, data, size)
            finally:
                os.close(handle)
        except OSError as exc:
            raise _unreadable(path, exc) from exc
        return data

    def read_many(self, positions: NDArray[np.int64]) -> list[Encoded | SourceError]:
        """Return the bytes of many files, read without the interpreter; valid until this thread's next call."""
        from fastdata.sources.batchread import read_files  # imports numba, which indexing a folder does not need

        found: list[Encoded | SourceError] = []
        views = read_files(self._prefix, self._scan.paths, self.ids[positions])
        for view, position in zip(views, positions.tolist(), strict=True):
            if view is not None:
                found.append(view)
                continue
            try:
                found.append(self.read(position))
            except SourceError as error:
                found.append(error)
        return found

    def read_into(self, position: int, room: Callable[[int], memoryview]) -> memoryview:
        """Read the bytes of one file to where the caller wants them.

        Args:
            position: The sample.
            room: Takes the file's size in bytes and returns writable memory of that size; may raise to refuse it.

        Returns:
            The part of that memory that was filled.
        """
        path = self.path(position)
        try:
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                place = room(os.fstat(handle).st_size)
                filled = 0
                while filled < len(place) and (count := os.readv(handle, [place[filled:]])):
                    filled += count
            finally:
                os.close(handle)
        except OSError as exc:
            raise _unreadable(path, exc) from exc
        return place[:filled]

    def where(self, position: int) -> str:
        """Return the path of one file."""
        return printable(self.path(position))

    def will_need(self, positions: NDArray[np.int64]) -> None:
        """Do nothing: an advice for each file costs about as much as reading it."""

    def close(self) -> None:
        """Do nothing: no handle is held."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "labels": None if self.labels is self._scan.labels else self.labels,
                "_from_folders": self.labels is self._scan.labels and self.labels is not None,
                "ids": None if len(self.ids) == len(self._scan.paths) else self.ids}  # fmt: skip

    def __setstate__(self, state: dict[str, Any]) -> None:
        from_folders = state.pop("_from_folders")
        self.__dict__.update(state)
        if self.ids is None:
            self.ids = np.arange(len(self._scan.paths), dtype=np.int64)
        if from_folders:
            self.labels = self._scan.labels


def _unreadable(path: bytes, exc: OSError) -> SourceError:
    return SourceError(printable(path), exc.strerror or str(exc), "a readable file")


def _read_on(handle: int, data: bytes, size: int) -> bytes:
    parts = [data]
    left = size - len(data)
    while left and (part := os.read(handle, left)):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
