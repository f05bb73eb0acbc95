"""Looks at a folder (or shards) before anyone trains on it: files that some or all decoders refuse, odd ones, junk."""

from __future__ import annotations

import io
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from fastdata import jpeg
from fastdata.cores import usable_cores
from fastdata.decode import decode_reference, decode_turbo
from fastdata.errors import DecodeError, FastDataError, SourceError
from fastdata.progress import Bar
from fastdata.shards.facts import PictureFacts, read_facts
from fastdata.sources import IndexedSource
from fastdata.sources.folder import FolderSource, refuse_splits
from fastdata.sources.open import is_shards, open_source
from fastdata.sources.paths import printable
from fastdata.sources.scan import scan_folder

UNREADABLE: Final = "unreadable"
EMPTY_CLASS: Final = "class without pictures"
CLASH: Final = "same name twice"
KINDS: Final[Mapping[str, str]] = {
    UNREADABLE: "no backend can decode these: they stop a run, or are skipped",
    EMPTY_CLASS: "opening the folder refuses these: leaving them out would move labels",
    CLASH: "files of one class that differ in the extension alone: often one picture twice",
    "mislabelled": "the content is of another type than the name says; read by content on every backend",
    "odd colour": "not plain gray or RGB in 8 bits: converted as the reference does, alpha dropped",
    "slow path": "fast decoders and the GPU must not take these; the reference decodes them, slower",
    "damaged": "fast decoders find damage that the reference forgives; check these by eye",
    "turned": "Exif says that these are to be turned: the default, while ImageFolder shows them as stored",
    "tiny": "a short side under 32 pixels",
}
"""Kinds of findings, the worst first, and what each means."""
_BAD = (UNREADABLE, EMPTY_CLASS)
_TINY_PIXELS = 32
_PLAIN_MODES = ("L", "RGB", "1")
_SAME = {"jpeg": "jpg", "jpe": "jpg", "jfif": "jpg", "tiff": "tif", "pgm": "ppm", "pbm": "ppm", "pnm": "ppm"}
_CHUNK = 8


@dataclass(frozen=True)
class Finding:
    """One file, or class, that deserves a look."""

    kind: str
    """One of `KINDS`."""
    path: str
    """The file (or shard and member), or the class folder."""
    detail: str
    """What exactly."""


@dataclass(frozen=True)
class CheckReport:
    """What a check found."""

    root: str
    """What was checked."""
    files: int
    """Number of pictures."""
    size_bytes: int
    """Of all pictures."""
    types: Mapping[str, int]
    """Number of pictures by content: "jpg", "progressive jpg", "png", ..."""
    classes: Mapping[str, int]
    """Number of pictures in each class; empty without class folders."""
    ignored: Mapping[str, int]
    """Files that are no pictures by name, by kind."""
    findings: tuple[Finding, ...]
    """In the order of `KINDS`, then of paths."""

    @property
    def ok(self) -> bool:
        """Whether every file can be decoded and every class has one."""
        return not any(finding.kind in _BAD for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        """Return all of it as JSON-able values."""
        return {
            "schema": 1,
            "root": self.root,
            "ok": self.ok,
            "files": self.files,
            "bytes": self.size_bytes,
            "types": dict(self.types),
            "classes": dict(self.classes),
            "ignored": dict(self.ignored),
            "findings": [vars(finding) for finding in self.findings],
        }


def check_data(data: str | Path, *, workers: int | None = None) -> CheckReport:
    """Read and decode every picture once.

    Args:
        data: A folder of class folders, a folder of pictures, or shards.
        workers: Threads; None: one for each usable core.

    Raises:
        SourceError: There is nothing to check.
        UsageError: The folder holds splits.
    """
    findings: list[Finding] = []
    classes: dict[str, int] = {}
    if is_shards(data):
        source = open_source(data, labels="folders")
        ignored: Mapping[str, int] = {}
        if source.labels is not None and source.classes:
            counts = np.bincount(source.labels.astype(np.int64), minlength=len(source.classes))
            classes = dict(zip(source.classes, counts.tolist(), strict=True))
    else:
        source, classes, ignored = _open_folder(Path(data))
        findings += [
            Finding(EMPTY_CLASS, os.path.join(data, name), "0 pictures") for name, count in classes.items() if not count
        ]
        findings += _clashes(source)
    size_bytes, types = 0, Counter[str]()
    with (
        Bar(f"Checking {data}", len(source), "images") as bar,
        ThreadPoolExecutor(workers or usable_cores()) as pool,
    ):
        starts = range(0, len(source), _CHUNK)
        for start, looked in zip(starts, pool.map(lambda start: _look_at_chunk(source, start), starts), strict=True):
            chunk_bytes = sum(look.size_bytes for look in looked)
            size_bytes += chunk_bytes
            types.update(look.type_name for look in looked)
            findings += [finding for look in looked for finding in look.findings]
            bar.advance(min(_CHUNK, len(source) - start), chunk_bytes)
    rank = {kind: number for number, kind in enumerate(KINDS)}
    findings.sort(key=lambda finding: (rank[finding.kind], finding.path))
    return CheckReport(str(data), len(source), size_bytes, dict(types), classes, ignored, tuple(findings))


@dataclass(frozen=True, slots=True)
class _Look:
    size_bytes: int
    type_name: str
    findings: tuple[Finding, ...]


def _open_folder(root: Path) -> tuple[FolderSource, dict[str, int], Mapping[str, int]]:
    """Open a folder with or without classes; unlike `open_folder`, take one that has a class without pictures."""
    if not root.is_dir():
        raise SourceError(str(root), "no such folder", "a folder of pictures, or shards")
    scan = scan_folder(os.fsencode(root), class_folders=True)
    if not len(scan.paths):
        scan = scan_folder(os.fsencode(root), class_folders=False)
    if not len(scan.paths):
        raise SourceError(str(root), "no pictures", "a folder of pictures, or shards")
    refuse_splits(root, scan)
    counts = np.bincount(scan.labels, minlength=len(scan.classes)).tolist()
    source = FolderSource(root, scan, np.arange(len(scan.paths), dtype=np.int64), None, (), scan.ignored)
    return source, dict(zip(scan.classes, counts, strict=True)), scan.ignored


def _clashes(source: FolderSource) -> Iterator[Finding]:
    """Yield files whose paths differ in the extension alone. Paths are sorted, so these are near each other."""
    stems: dict[bytes, list[bytes]] = defaultdict(list)
    folder = b""
    for path in source.relative_paths:
        if path.rpartition(b"/")[0] != folder:
            yield from _clashes_of(source, stems)
            stems.clear()
            folder = path.rpartition(b"/")[0]
        stems[path.rpartition(b".")[0]].append(path)
    yield from _clashes_of(source, stems)


def _clashes_of(source: FolderSource, stems: Mapping[bytes, list[bytes]]) -> Iterator[Finding]:
    for paths in stems.values():
        for path in paths[1:]:
            yield Finding(CLASH, os.path.join(source.root, printable(path)), f"beside {printable(paths[0])}")


def _look_at_chunk(source: IndexedSource, start: int) -> list[_Look]:
    return [_look_at(source, position) for position in range(start, min(start + _CHUNK, len(source)))]


def _look_at(source: IndexedSource, position: int) -> _Look:
    where = source.where(position)
    try:
        data = source.read(position)
    except SourceError as error:
        return _Look(0, UNREADABLE, (Finding(UNREADABLE, where, error.found),))
    try:
        facts = read_facts(data)
        pixels = decode_reference(data)
    except FastDataError as error:
        return _Look(len(data), UNREADABLE, (Finding(UNREADABLE, where, error.found),))
    findings = list(_remarks(where, data, facts))
    if min(pixels.shape[:2]) < _TINY_PIXELS:
        findings.append(Finding("tiny", where, f"{facts.width} x {facts.height} pixels"))
    return _Look(len(data), ("progressive " * facts.progressive) + facts.extension, tuple(findings))


def _remarks(where: str, data: bytes | memoryview, facts: PictureFacts) -> Iterator[Finding]:
    named = where.rpartition(".")[2].lower()
    if _SAME.get(named, named) != facts.extension:
        yield Finding("mislabelled", where, f"a {facts.extension} file named .{named}")
    if facts.orientation != 1:
        yield Finding("turned", where, f"Exif orientation {facts.orientation}")
    if colour := _odd_colour(data, facts):
        yield Finding("odd colour", where, colour)
    if facts.refusal:
        yield Finding("slow path", where, jpeg.REFUSALS[facts.refusal])
        return
    try:
        decode_turbo(data)
    except DecodeError as error:
        yield Finding("damaged", where, error.found)


def _odd_colour(data: bytes | memoryview, facts: PictureFacts) -> str:
    """Return how the colours of a picture are coded where that is unusual, else ""."""
    if facts.extension == "jpg" and facts.refusal not in (jpeg.COMPONENTS, jpeg.RGB_CODED):
        return ""
    from PIL import Image  # here, since most folders hold nothing but plain JPEGs

    with Image.open(io.BytesIO(data)) as picture:
        mode = picture.mode
        transparent = "transparency" in picture.info
    if mode in _PLAIN_MODES and not transparent and facts.refusal != jpeg.RGB_CODED:
        return ""
    return (
        f"Pillow's mode {mode}"
        + ", with transparency" * transparent
        + ", RGB-coded" * (facts.refusal == jpeg.RGB_CODED)
    )
