"""Indexed shards as a source: pictures are slices of memory-mapped tars, found through the index beside them.

Shards of other writers have no index; one is made on first use and kept in the user's cache. Their samples' ids are
their places in (shard, offset) order.
"""

from __future__ import annotations

import hashlib
import os
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fastdata.errors import ShardError, SourceError, UsageError
from fastdata.order import ShardLayout
from fastdata.progress import Bar
from fastdata.sources import Encoded, read_one_by_one
from fastdata.sources.fingerprint import sample_fingerprint
from fastdata.sources.mapping import advise_will_need, map_file
from fastdata.sources.paths import PathTable
from fastdata.sources.scan import user_cache_dir
from fastdata.sources.shardindex import (
    CLASSES_NAME,
    INDEX_NAME,
    WORK_NAME,
    ShardIndex,
    ShardInfo,
    read_index,
    storage_layout,
    write_index,
)
from fastdata.sources.shardlist import ShardSpec, list_shards, missing_shards_error
from fastdata.sources.tarscan import ShardSamples, member_name, scan_shard
from fastdata.spec import Labels
from fastdata.wording import counted

CACHE_FROM_SAMPLES = 1_000
"""The index of fewer samples in other writers' shards is made anew each time."""
_SETTLED_S = 2.0  # as in fastdata.sources.scan


def open_shards(
    spec: ShardSpec,
    labels: Labels = "folders",
    *,
    allow_missing: bool = False,
    skip_damaged: bool = False,
    cache_dir: str | Path | Literal["auto"] | None = "auto",
) -> TarSource:
    """Open shards by position.

    Args:
        spec: A folder, a file, a pattern, a range in braces, or a list of these (see
            `fastdata.sources.shardlist.list_shards`). All forms give the same samples with the same ids.
        labels: ``"folders"``: those stored in the shards. None: no labels.
        allow_missing: Read the other shards where some of a set or range are not there, with a warning.
        skip_damaged: Leave out what is damaged (the rest of a cut shard, a picture without its label), and list it in
            `TarSource.faults`.
        cache_dir: Where the index of other writers' shards is kept; "auto": the user's cache folder. None: nowhere.

    Raises:
        SourceError: Nothing matches.
        ShardError: A shard is missing, cut, or not as its index says, or the set was not finished.
        UsageError: Labels that shards cannot give.
    """
    if labels is not None and labels != "folders":
        raise UsageError("labels", f"{labels!r} with shards", '"folders" (the labels in the shards), or None')
    paths, missing = list_shards(spec)
    _refuse_unfinished(paths)
    index_file = _own_index(paths)
    if index_file is not None:
        index, missing = _select(read_index(index_file), spec, paths, missing)
        index = replace(index, shards=tuple(replace(s, name=str(index_file.parent / s.name)) for s in index.shards))
    if missing:
        if not allow_missing:
            raise missing_shards_error(spec, missing, len(paths))
        warnings.warn(f"{spec}: {counted(len(missing), 'shard')} missing, left out", UserWarning, stacklevel=2)
    faults: list[str] = []
    if index_file is None:
        index, faults = _foreign_index(paths, labels is not None, skip_damaged, cache_dir)
    index = _check_sizes(index, faults, skip_damaged)
    return TarSource(str(spec), index, with_labels=labels is not None, faults=tuple(faults))


class TarSource:
    """Samples in indexed shards as an `fastdata.sources.IndexedSource`. Make it with `open_shards`."""

    def __init__(self, root: str, index: ShardIndex, *, with_labels: bool, faults: tuple[str, ...] = ()) -> None:
        """Serve an index.

        Args:
            root: What the shards were opened from, for messages.
            index: Its shards' names are paths.
            with_labels: Whether to offer the labels.
            faults: What was left out as damaged.
        """
        stored = index.facts.get("stored", "original")
        self.kind = "crop-ready shards" if stored == "crop-ready" else "shards"
        self.root = root
        self.index = index
        self.faults = faults
        self.ids: NDArray[np.int64] = index.columns["ids"]
        self.labels: NDArray[np.int64] | NDArray[np.float32] | None = index.columns["labels"] if with_labels else None
        self.classes = index.classes if with_labels else ()
        self.fingerprint = index.fingerprint
        self.layout: ShardLayout | None = ShardLayout(index.storage_order, index.shard_starts)
        self._shard: NDArray[np.int32] = index.columns["shard"]
        self._offset: NDArray[np.int64] = index.columns["offset"]
        self._size: NDArray[np.int64] = index.columns["size"]
        self._maps: dict[int, tuple[memoryview, int]] = {}

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.ids)

    def read(self, position: int) -> memoryview:
        """Return the bytes of one picture as they lie in the mapped shard, without a copy."""
        view, _ = self._map(int(self._shard[position]))
        start = int(self._offset[position])
        return view[start : start + int(self._size[position])]

    def read_many(self, positions: NDArray[np.int64]) -> list[Encoded | SourceError]:
        """Return views of many samples: no bytes are copied."""
        return read_one_by_one(self, positions)

    def where(self, position: int) -> str:
        """Return shard and member of one sample."""
        number = int(self._shard[position])
        view, _ = self._map(number)
        return f"{self.index.shards[number].name} member {member_name(view, int(self._offset[position]))}"

    def original_path(self, position: int) -> bytes:
        """Return the path a sample had in the folder it was converted from, or the name of its member."""
        return self.index.paths[position]

    def will_need(self, positions: NDArray[np.int64]) -> None:
        """Start reading samples in the background; neighbours in a shard become one request."""
        shards, starts = self._shard[positions], self._offset[positions]
        order = np.lexsort((starts, shards))
        shards, starts, stops = shards[order], starts[order], (starts + self._size[positions])[order]
        edges = np.flatnonzero(np.diff(shards)) + 1
        for piece in np.split(np.arange(len(shards)), edges):
            if len(piece):
                _, address = self._map(int(shards[piece[0]]))
                advise_will_need(address, starts[piece], stops[piece])

    def close(self) -> None:
        """Drop the maps; memory of samples that are still held stays valid."""
        self._maps = {}

    def _map(self, number: int) -> tuple[memoryview, int]:
        found = self._maps.get(number)
        if found is None:  # two threads may both map it: the later one wins, the other's slices stay valid
            info = self.index.shards[number]
            try:
                found = map_file(info.name)
            except OSError as exc:
                raise ShardError(info.name, exc.strerror or str(exc), "a readable shard") from exc
            if len(found[0]) != info.size_bytes:
                raise _size_error(info, len(found[0]))
            self._maps[number] = found
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.root, self.index, self.labels is not None, self.faults)


def _rebuild(root: str, index: ShardIndex, with_labels: bool, faults: tuple[str, ...]) -> TarSource:
    return TarSource(root, index, with_labels=with_labels, faults=faults)


def _refuse_unfinished(paths: Sequence[str]) -> None:
    for folder in sorted({Path(path).parent for path in paths}):
        for work in (folder / WORK_NAME, folder.parent / WORK_NAME):
            if work.exists():
                raise ShardError(
                    str(folder),
                    f"an unfinished conversion ({work} is there)",
                    "a finished set of shards",
                    "Run the conversion again with --resume, or wait until it ends.",
                )
        # Without their index these shards would pass for another writer's, with other ids and so other labels.
        if (folder / CLASSES_NAME).exists() and not (folder / INDEX_NAME).exists():
            raise ShardError(
                str(folder),
                f"converted shards ({CLASSES_NAME} is there) without {INDEX_NAME}",
                "the index beside its shards",
                f"Restore {INDEX_NAME}, or convert again. Without {CLASSES_NAME} they pass for foreign shards.",
            )


def _own_index(paths: Sequence[str]) -> Path | None:
    """Return the index that all these shards belong to, if there is one."""
    folders = {os.path.dirname(path) for path in paths}
    if len(folders) != 1:
        return None
    path = Path(folders.pop()) / INDEX_NAME
    return path if path.exists() else None


def _select(
    index: ShardIndex, spec: ShardSpec, paths: Sequence[str], missing: list[str]
) -> tuple[ShardIndex, list[str]]:
    """Restrict an index to the shards that are meant and there; for a whole folder, name those that are not there."""
    given = {os.path.basename(path) for path in paths}
    known = {shard.name for shard in index.shards}
    surplus = sorted(given - known)
    if surplus:
        raise ShardError(
            os.path.join(os.path.dirname(paths[0]), surplus[0]),
            f"a shard that the index beside it does not know ({len(surplus)} such)",
            "only the shards of one set",
            "Move it to another folder, or convert again with --overwrite.",
        )
    if isinstance(spec, str | Path) and os.path.isdir(spec):
        missing = [os.path.join(spec, shard.name) for shard in index.shards if shard.name not in given]
    if len(given) < len(known):
        index = restrict(index, np.array([shard.name in given for shard in index.shards]))
    return index, missing


def restrict(index: ShardIndex, keep_shard: NDArray[np.bool_], keep: NDArray[np.bool_] | None = None) -> ShardIndex:
    """Return an index of some shards, and of some of their samples; ids stay as they are."""
    if keep is None:
        keep = keep_shard[index.columns["shard"]]
    columns = {name: np.ascontiguousarray(column[keep]) for name, column in index.columns.items()}
    numbers = np.cumsum(keep_shard, dtype=np.int32) - 1
    columns["shard"] = numbers[columns["shard"]].astype(np.int32)
    order, starts = storage_layout(columns["shard"], columns["offset"], int(keep_shard.sum()))
    counts = np.diff(starts)
    shards = [shard for shard, kept in zip(index.shards, keep_shard, strict=True) if kept]
    paths = index.paths.take(np.flatnonzero(keep))
    return replace(
        index,
        shards=tuple(replace(shard, samples=int(count)) for shard, count in zip(shards, counts, strict=True)),
        columns=columns,
        paths=paths,
        storage_order=order,
        shard_starts=starts,
        fingerprint=sample_fingerprint(columns["ids"], paths),
        file=None,
    )


def _check_sizes(index: ShardIndex, faults: list[str], skip_damaged: bool) -> ShardIndex:
    keep_shard = np.ones(len(index.shards), np.bool_)
    keep: NDArray[np.bool_] | None = None
    shards = list(index.shards)
    for number, info in enumerate(index.shards):
        size = os.stat(info.name).st_size
        if size == info.size_bytes:
            continue
        error = _size_error(info, size)
        if not skip_damaged:
            raise error
        faults.append(str(error))
        if keep is None:
            keep = np.ones(len(index), np.bool_)
        ends = index.columns["offset"] + index.columns["size"]
        keep &= (index.columns["shard"] != number) | (ends <= size)
        shards[number] = replace(info, size_bytes=size)
    if keep is None:
        return index
    keep_shard[np.bincount(index.columns["shard"][keep], minlength=len(shards)) == 0] = False
    if not keep_shard.any():
        raise ShardError(index.shards[0].name, "no whole sample in any shard: " + faults[0])
    return restrict(replace(index, shards=tuple(shards)), keep_shard, keep)


def _size_error(info: ShardInfo, size: int) -> ShardError:
    return ShardError(
        info.name,
        f"{size} bytes",
        f"{info.size_bytes} bytes as the index says",
        "It is cut or altered: copy it again (`fastdata verify` names every fault).",
    )


def _foreign_index(
    paths: Sequence[str], want_labels: bool, skip_damaged: bool, cache_dir: str | Path | Literal["auto"] | None
) -> tuple[ShardIndex, list[str]]:
    """Return the index of shards that have none beside them, from the cache where they did not change."""
    stats = [os.stat(path) for path in paths]
    infos = [
        ShardInfo(os.path.abspath(path), stat.st_size, 0, modified_ns=stat.st_mtime_ns)
        for path, stat in zip(paths, stats, strict=True)
    ]
    cache_file = _cache_file(infos, want_labels, cache_dir)
    if cache_file is not None and (kept := _kept_index(cache_file, infos)) is not None:
        return kept, []
    started_ns = time.time_ns()
    scans: list[ShardSamples] = []
    with Bar("Indexing shards", len(paths), "shards") as bar:
        for info in infos:
            scans.append(scan_shard(info.name, want_labels=want_labels, skip_damaged=skip_damaged))
            bar.advance(1, info.size_bytes)
    faults = [fault for scan in scans for fault in scan.faults]
    if not any(scan.names for scan in scans):
        raise SourceError(
            ", ".join(paths[:3]), "no samples in these shards" + "".join(f"; {f}" for f in faults[:3]), "pictures"
        )
    index = _join(infos, scans, want_labels)
    settled = max(info.modified_ns for info in infos) < started_ns - _SETTLED_S * 1e9
    if cache_file is not None and len(index) >= CACHE_FROM_SAMPLES and settled and not faults:
        try:
            cache_file.parent.mkdir(parents=True, exist_ok=True)
            write_index(cache_file, index)
        except OSError:  # a cache folder that cannot be written costs time later, and nothing else
            return index, faults
        return read_index(cache_file), faults
    return index, faults


def _join(infos: Sequence[ShardInfo], scans: Sequence[ShardSamples], want_labels: bool) -> ShardIndex:
    counts = [len(scan.names) for scan in scans]
    total = sum(counts)
    columns: dict[str, NDArray[Any]] = {
        "ids": np.arange(total, dtype=np.int64),
        "shard": np.repeat(np.arange(len(scans), dtype=np.int32), counts),
        "offset": np.array([offset for scan in scans for offset in scan.offsets], np.int64),
        "size": np.array([size for scan in scans for size in scan.sizes], np.int64),
    }
    if want_labels:
        columns["labels"] = np.array([label for scan in scans for label in scan.labels], np.int64)
    ignored: Counter[str] = Counter()
    for scan in scans:
        ignored.update(scan.ignored)
    order, starts = storage_layout(columns["shard"], columns["offset"], len(scans))
    paths = PathTable.from_paths([name for scan in scans for name in scan.names])
    return ShardIndex(
        shards=tuple(replace(info, samples=count) for info, count in zip(infos, counts, strict=True)),
        columns=columns,
        paths=paths,
        storage_order=order,
        shard_starts=starts,
        classes=(),
        fingerprint=sample_fingerprint(columns["ids"], paths),
        facts={"stored": "original", "ignored": dict(ignored)},
    )


def _cache_file(
    infos: Sequence[ShardInfo], want_labels: bool, cache_dir: str | Path | Literal["auto"] | None
) -> Path | None:
    if cache_dir is None:
        return None
    base = user_cache_dir() if cache_dir == "auto" else Path(cache_dir)
    key = hashlib.blake2b(bytes([want_labels]), digest_size=16, person=b"shard index")
    for info in infos:
        key.update(os.fsencode(info.name) + b"\0")
    return base / "shards" / f"{key.hexdigest()}.index"


def _kept_index(cache_file: Path, infos: Sequence[ShardInfo]) -> ShardIndex | None:
    try:
        kept = read_index(cache_file)
    except SourceError:
        return None
    same = len(kept.shards) == len(infos) and all(
        (one.name, one.size_bytes, one.modified_ns) == (other.name, other.size_bytes, other.modified_ns)
        for one, other in zip(kept.shards, infos, strict=True)
    )
    return kept if same else None
