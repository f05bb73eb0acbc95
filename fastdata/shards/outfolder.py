"""What lies in the folder shards are written to: telling one's own files from others', and removing only the first."""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from fastdata.errors import ShardError
from fastdata.sources.shardindex import CLASSES_NAME, INDEX_NAME

SKIPPED_NAME = "skipped.json"
"""Path and reason of each file that was left out."""
NOT_CROP_READY_NAME = "not-crop-ready.json"
"""Path and reason of each file that could not be made crop-ready."""
SPLITS_NAME = "splits.json"
"""In the folder above the splits: name of each split and its number of samples."""

_SHARD_NAME = re.compile(r"shard-(\d{6,})\.tar")


def shard_number(name: str) -> int | None:
    """Return the number in one of our shards' names, None for other names."""
    match = _SHARD_NAME.fullmatch(name)
    return int(match.group(1)) if match else None


def holds_shards(out: Path, split_names: Sequence[str]) -> bool:
    """Tell whether anything lies where shards would go: tars, an index, or the list of an earlier run's splits."""
    if (out / SPLITS_NAME).exists():
        return True
    return any((folder / INDEX_NAME).exists() or any(folder.glob("*.tar")) for folder in _folders(out, split_names))


def refuse_unwritable_folder(out: Path) -> None:
    """Refuse a folder that cannot be made or written to. Tries it, and leaves nothing behind.

    Raises:
        ShardError: It cannot be.
    """
    missing: list[Path] = []
    try:
        missing = [path for path in (out, *out.parents) if not path.exists()]
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()
    except OSError as exc:
        raise ShardError(
            str(out),
            f"cannot be {'made' if missing else 'written to'}: {exc.strerror or exc}",
            "a folder for the shards",
            "Choose another.",
        ) from exc
    finally:
        for path in missing:
            with contextlib.suppress(OSError):  # it was not made, or another process has put something into it
                path.rmdir()


def refuse_others_tars(out: Path, split_names: Sequence[str]) -> None:
    """Refuse a folder with tars that no converter of ours wrote: they would be read along with the set.

    Raises:
        ShardError: There is one; names it.
    """
    for folder in _folders(out, split_names):
        for path in sorted(folder.glob("*.tar")):
            if shard_number(path.name) is None:
                raise ShardError(str(path), "a tar of another origin", "a folder for this set alone", "Move it away.")


def clear_set(out: Path, split_names: Sequence[str]) -> None:
    """Remove an earlier set: first what marks it as finished, then its shards. Touches no other file.

    Args:
        out: The folder.
        split_names: Splits that will be written, besides those that the folder says it holds.
    """
    for folder in _folders(out, split_names):
        (folder / INDEX_NAME).unlink(missing_ok=True)
    for folder in _folders(out, split_names):
        remove_shards_from(folder, 0)
        for name in (CLASSES_NAME, SKIPPED_NAME, NOT_CROP_READY_NAME):
            (folder / name).unlink(missing_ok=True)
        if folder != out and not any(folder.iterdir()):
            folder.rmdir()
    (out / SPLITS_NAME).unlink(missing_ok=True)


def remove_shards_from(folder: Path, first: int) -> None:
    """Remove our shards from a number on."""
    for path in folder.glob("shard-*.tar"):
        number = shard_number(path.name)
        if number is not None and number >= first:
            path.unlink()


def read_splits(out: Path) -> dict[str, int]:
    """Return the splits that a folder says it holds, with their numbers of samples; empty without splits."""
    try:
        splits: dict[str, int] = json.loads((out / SPLITS_NAME).read_text("utf-8"))
    except FileNotFoundError:
        return {}
    return splits


def _folders(out: Path, split_names: Sequence[str]) -> Iterator[Path]:
    yield out
    for name in sorted({*read_splits(out), *filter(None, split_names)}):
        if (out / name).is_dir():
            yield out / name
