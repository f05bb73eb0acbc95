"""Which samples go where: labels by a class map, stratified splits, storage order. Nothing here writes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fastdata.errors import UsageError
from fastdata.order import permute
from fastdata.rng import scalar_key
from fastdata.shards.options import ConvertOptions
from fastdata.sources.folder import FolderSource
from fastdata.wording import counted

_STREAM_STORAGE = 32  # apart from the streams in fastdata.rng, so that storage and training orders are unrelated
_STREAM_SPLIT = 33


@dataclass(frozen=True)
class SplitPlan:
    """One set of shards to write."""

    name: str
    """Of the split, which is also its folder; "" for the whole set."""
    positions: NDArray[np.int64]
    """(n,) positions in the source, in storage order."""


def read_class_map(path: Path) -> tuple[str, ...]:
    """Read a class map: JSON (an object of name to label, or a list of names) or text (one name a line).

    Returns:
        Class names by label.

    Raises:
        UsageError: It is missing, something else, or its labels are not 0..n-1, each once.
    """
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise UsageError("class_map", f"{path}: {exc}", "a UTF-8 text file") from exc
    if path.suffix.lower() == ".json":
        try:
            given = json.loads(text)
        except ValueError as exc:
            raise UsageError("class_map", f"{path}: {exc}", "JSON") from exc
    else:
        given = [line.strip() for line in text.splitlines() if line.strip()]
    if isinstance(given, list):
        given = {name: label for label, name in enumerate(given)} if len(set(map(str, given))) == len(given) else None
    if (
        not isinstance(given, dict)
        or not given
        or sorted(given.values(), key=repr) != sorted(range(len(given)), key=repr)
    ):
        raise UsageError("class_map", f"{path}", "each class name once, with labels 0..n-1, each once")
    return tuple(str(name) for name, _ in sorted(given.items(), key=lambda item: int(item[1])))


def map_labels(source: FolderSource, class_map: Path | None) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Return the label of each sample, and the class names by label.

    Raises:
        UsageError: The class map lacks a class of the folder.
    """
    assert source.labels is not None
    labels = source.labels.astype(np.int64, copy=False)
    if class_map is None:
        return labels, source.classes
    names = read_class_map(class_map)
    known = {name: label for label, name in enumerate(names)}
    unknown = [name for name in source.classes if name not in known]
    if unknown:
        raise UsageError(
            "class_map",
            f"{class_map} lacks {counted(len(unknown), 'class')} of {source.root}: {', '.join(unknown[:10])}",
            "every class of the folder",
        )
    return np.array([known[name] for name in source.classes], np.int64)[labels], names


def plan_splits(labels: NDArray[np.int64], options: ConvertOptions) -> tuple[SplitPlan, ...]:
    """Divide the samples, class by class, and put each part in storage order.

    Raises:
        UsageError: A split would be empty.
    """
    if not options.split:
        return (SplitPlan("", _storage_order(np.arange(len(labels), dtype=np.int64), options, 0)),)
    part_of = _stratify(labels, [share for _, share in options.split], options.seed)
    plans = []
    for number, (name, share) in enumerate(options.split):
        positions = np.flatnonzero(part_of == number).astype(np.int64)
        if not len(positions):
            raise UsageError(
                "split", f"{name}={share:g} of {counted(len(labels), 'sample')} is none", "at least one sample"
            )
        plans.append(SplitPlan(name, _storage_order(positions, options, number)))
    return tuple(plans)


def source_digest(source: FolderSource, labels: NDArray[np.int64], classes: Sequence[str]) -> str:
    """Return a digest over the folder's paths, labels and class names: what a resumed conversion must find again."""
    digest = hashlib.blake2b(json.dumps(list(classes)).encode("ascii"), digest_size=16)
    paths = source.relative_paths
    digest.update(np.ascontiguousarray(paths.offsets, "<i8").data)
    digest.update(np.ascontiguousarray(paths.blob).data)
    digest.update(np.ascontiguousarray(labels, "<i8").data)
    return digest.hexdigest()


def _storage_order(positions: NDArray[np.int64], options: ConvertOptions, number: int) -> NDArray[np.int64]:
    if not options.shuffle:
        return positions
    key = int(scalar_key(options.seed, number, _STREAM_STORAGE))
    return positions[permute(np.arange(len(positions), dtype=np.int64), len(positions), key)]


def _stratify(labels: NDArray[np.int64], shares: Sequence[float], seed: int) -> NDArray[np.int64]:
    """Return the split of each sample: each class is divided by the shares, what rounding leaves over is carried on.

    So the counts of a class differ from the shares by less than about one, and so do those of the whole.
    """
    part_of = np.empty(len(labels), np.int64)
    order = np.argsort(labels, kind="stable")
    starts = np.flatnonzero(np.diff(labels[order], prepend=labels[order[0]] - 1))
    owed = np.zeros(len(shares))
    for members in np.split(order, starts[1:]):
        n = len(members)
        owed += n * np.asarray(shares)
        counts = _round_to_sum(owed, n)
        owed -= counts
        key = int(scalar_key(seed, int(labels[members[0]]), _STREAM_SPLIT))
        mixed = members[permute(np.arange(n, dtype=np.int64), n, key)]
        part_of[mixed] = np.repeat(np.arange(len(shares)), counts)
    return part_of


def _round_to_sum(wanted: NDArray[np.float64], total: int) -> NDArray[np.int64]:
    """Return whole numbers >= 0 near `wanted` that sum to `total`, by largest remainders."""
    counts = np.floor(np.maximum(wanted + 1e-9, 0)).astype(np.int64)
    while counts.sum() != total:
        if counts.sum() < total:
            counts[np.argmax(wanted - counts)] += 1
        else:
            counts[np.argmin(np.where(counts > 0, wanted - counts, np.inf))] -= 1
    return counts
