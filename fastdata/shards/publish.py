"""Ends a split: joins the records of its shards to the index, and writes what people read beside it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastdata.shards.outfolder import NOT_CROP_READY_NAME, SKIPPED_NAME
from fastdata.shards.tarformat import shard_name
from fastdata.shards.workfolder import ShardRecord, write_text
from fastdata.sources.fingerprint import sample_fingerprint
from fastdata.sources.folder import FolderSource
from fastdata.sources.paths import printable
from fastdata.sources.shardindex import CLASSES_NAME, INDEX_NAME, ShardIndex, ShardInfo, storage_layout, write_index


def publish_split(
    folder: Path,
    records: Sequence[ShardRecord],
    source: FolderSource,
    labels: NDArray[np.int64],
    classes: tuple[str, ...],
    facts: Mapping[str, Any],
) -> None:
    """Write class map, lists of skipped files and of those that are not crop-ready, and, last, the index.

    Args:
        folder: Where the split's shards lie.
        records: Of all its shards, in order.
        source: Where its samples came from.
        labels: (n,) label of each position of the source.
        classes: Class names by label.
        facts: What the index states besides; JSON-able.
    """
    skipped = [entry for record in records for entry in record.skipped]
    not_crop_ready = [entry for record in records for entry in record.not_crop_ready]
    write_text(folder / CLASSES_NAME, json.dumps({name: label for label, name in enumerate(classes)}, indent=1) + "\n")
    _write_list(folder / SKIPPED_NAME, skipped, source)
    _write_list(folder / NOT_CROP_READY_NAME, not_crop_ready, source)
    notes: Counter[str] = Counter()
    for record in records:
        notes.update(record.notes)
    reasons = Counter(reason for _, reason in not_crop_ready)
    facts = {
        **facts,
        "skipped": len(skipped),
        "not_crop_ready": dict(sorted(reasons.items())),
        "notes": dict(sorted(notes.items())),
    }
    index = _join(records, source, labels, classes, facts)
    write_index(folder / INDEX_NAME, index)


def _write_list(path: Path, entries: Sequence[tuple[int, str]], source: FolderSource) -> None:
    """List files with reasons, by path; without any, write nothing."""
    if entries:
        rows = [
            {"id": int(source.ids[position]), "path": printable(source.relative_path(position)), "reason": reason}
            for position, reason in sorted(entries)
        ]
        write_text(path, json.dumps(rows, indent=1) + "\n")


def _join(
    records: Sequence[ShardRecord],
    source: FolderSource,
    labels: NDArray[np.int64],
    classes: tuple[str, ...],
    facts: Mapping[str, Any],
) -> ShardIndex:
    rows = {name: np.concatenate([record.rows[name] for record in records]) for name in records[0].rows}
    by_id = np.argsort(rows["position"])
    positions = rows.pop("position")[by_id]
    shard = np.repeat(np.arange(len(records), dtype=np.int32), [record.samples for record in records])
    columns: dict[str, NDArray[Any]] = {
        "ids": source.ids[positions],
        "shard": shard[by_id],
        **{name: column[by_id] for name, column in rows.items()},
        "labels": labels[positions],
    }
    order, starts = storage_layout(columns["shard"], columns["offset"], len(records))
    whole = len(positions) == len(source)
    paths = source.relative_paths if whole else source.relative_paths.take(columns["ids"])
    return ShardIndex(
        shards=tuple(
            ShardInfo(shard_name(number), record.size_bytes, record.samples, record.sha256)
            for number, record in enumerate(records)
        ),
        columns=columns,
        paths=paths,
        storage_order=order,
        shard_starts=starts,
        classes=classes,
        fingerprint=sample_fingerprint(columns["ids"], paths),
        facts=facts,
    )
