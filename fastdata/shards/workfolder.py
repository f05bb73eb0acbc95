"""Unfinished work beside the shards: a lock, the plan, a record of each finished shard. It makes ``kill -9`` harmless.

``OUT/.fastdata-work`` exists from before the first shard until after the index. A shard's record is written durably
before the shard gets its name, so every named shard has one; what has a record but no name is made again.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from fastdata.errors import ShardError, SourceError
from fastdata.shards.tarformat import shard_name
from fastdata.sources.arrayfile import read_array_file, sync_folder, write_array_file
from fastdata.sources.shardindex import WORK_NAME

_STAMPS = "stamps"
_NO_SPLIT = "all"  # stands for the whole set in names of files


@dataclass(frozen=True)
class ShardRecord:
    """What is known of one finished shard."""

    samples: int
    """Number of samples in it."""
    size_bytes: int
    """Of the file."""
    sha256: str
    """Hex digest of the file."""
    next_place: int
    """Place in the split's storage order after its last sample."""
    skipped: tuple[tuple[int, str], ...]
    """(position, reason) of samples that were left out before its last sample."""
    not_crop_ready: tuple[tuple[int, str], ...]
    """(position, reason) of its samples that could not be made crop-ready though that was asked for."""
    notes: Mapping[str, int]
    """How many of its samples re-encoding treated in which way."""
    rows: Mapping[str, NDArray[Any]] = field(repr=False)
    """(samples,) columns of the index, in storage order; ``position`` instead of ids, labels and paths."""
    stamps: NDArray[np.int64] = field(repr=False)
    """(n, 2): size in bytes and time of the last change in ns of each file, those left out included, from the place
    after the shard before to `next_place`; as they were before the files were read."""


class WorkFolder:
    """The locked work folder of one conversion."""

    def __init__(self, out: Path) -> None:
        """Make the folder and take its lock.

        Raises:
            ShardError: Another process converts into this folder.
        """
        self.out = out
        self.path = out / WORK_NAME
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The other process may have finished, and removed the folder, between our open and our lock.
            if os.stat(self.path / "lock").st_ino != os.fstat(self._lock).st_ino:
                raise BlockingIOError
        except (BlockingIOError, FileNotFoundError) as exc:
            os.close(self._lock)
            raise ShardError(
                str(out), "another process converts into this folder", "one at a time", "Wait until it ends."
            ) from exc

    @property
    def plan(self) -> dict[str, Any] | None:
        """The plan that an earlier run left, or None.

        Raises:
            ShardError: There is one, but it is damaged.
        """
        path = self.path / "plan.json"
        try:
            plan = json.loads(path.read_text("ascii"))
        except FileNotFoundError:
            return None
        except ValueError as exc:  # not ASCII, or not JSON
            raise _unreadable_plan(path, str(exc)) from exc
        options = plan.get("options") if isinstance(plan, dict) else None
        if not isinstance(plan, dict) or not isinstance(options, dict) or "split" not in options:
            raise _unreadable_plan(path, "it holds no options")
        return plan

    def recorded_splits(self) -> list[str]:
        """Return the names of the splits that an earlier run finished shards of, as its records tell."""
        return sorted({path.stem.rpartition("-")[0] for path in self.path.glob("*.record")} - {_NO_SPLIT})

    def start(self, plan: Mapping[str, Any]) -> None:
        """Drop what earlier runs left here and note the plan."""
        for path in self.path.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != "lock":
                path.unlink()
        write_text(self.path / "plan.json", json.dumps(plan))

    def temporary(self, split: str, number: int) -> Path:
        """Return where a shard grows."""
        return self.path / f"{split or _NO_SPLIT}-{number:06d}.partial"

    def records(self, split: str, folder: Path) -> list[ShardRecord]:
        """Return the records of the finished shards of a split; what lost its shard ends the list.

        A shard that has another size than its record says, or a record of an older version, counts as lost. What a
        shard holds is not looked at.
        """
        found: list[ShardRecord] = []
        while True:
            path = self._record_path(split, len(found))
            shard = folder / shard_name(len(found))
            try:
                header, rows = read_array_file(path)
                if shard.stat().st_size != header["size_bytes"]:
                    return found
            except (SourceError, FileNotFoundError):
                return found
            if _STAMPS not in rows or "not_crop_ready" not in header:
                return found  # of an earlier version: nobody knows whether its files have changed, or which were left
            found.append(
                ShardRecord(
                    header["samples"],
                    header["size_bytes"],
                    header["sha256"],
                    header["next_place"],
                    _entries(header["skipped"]),
                    _entries(header["not_crop_ready"]),
                    header["notes"],
                    {name: column for name, column in rows.items() if name != _STAMPS},
                    rows[_STAMPS],
                )
            )

    def keep_record(self, split: str, number: int, record: ShardRecord) -> None:
        """Note a shard that is about to get its name."""
        header = {
            "samples": record.samples,
            "size_bytes": record.size_bytes,
            "sha256": record.sha256,
            "next_place": record.next_place,
            "skipped": [list(entry) for entry in record.skipped],
            "not_crop_ready": [list(entry) for entry in record.not_crop_ready],
            "notes": dict(record.notes),
        }
        write_array_file(self._record_path(split, number), header, {**record.rows, _STAMPS: record.stamps})

    def forget(self, split: str, first: int) -> None:
        """Drop the records from a number on, and all half-written files."""
        for path in self.path.glob(f"{split or _NO_SPLIT}-*.record"):
            if int(path.stem.rpartition("-")[2]) >= first:
                path.unlink()
        for path in [*self.path.glob("*.partial"), *self.path.glob(".*.tmp")]:
            path.unlink()

    def remove(self) -> None:
        """Take the folder away in one step: the set is finished, or nothing of it is left."""
        gone = self.out / f"{WORK_NAME}-done-{os.getpid()}"
        os.rename(self.path, gone)
        sync_folder(self.out)
        shutil.rmtree(gone)

    def close(self) -> None:
        """Release the lock."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _record_path(self, split: str, number: int) -> Path:
        return self.path / f"{split or _NO_SPLIT}-{number:06d}.record"


def _unreadable_plan(path: Path, found: str) -> ShardError:
    return ShardError(
        str(path), f"an unreadable plan of an unfinished conversion ({found})", "", "Start anew with --overwrite."
    )


def _entries(rows: list[list[Any]]) -> tuple[tuple[int, str], ...]:
    return tuple((int(position), str(reason)) for position, reason in rows)


def write_text(path: Path, text: str) -> None:
    """Write a text file durably: whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)
