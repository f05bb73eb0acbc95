"""Which shard files a user means: a folder, one file, a pattern, a range in braces, or a list of these."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from fastdata.errors import ShardError, SourceError
from fastdata.wording import counted

ShardSpec = str | Path | Sequence[str | Path]

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*://|pipe:")
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_MOST_NAMED = 10


def is_url(item: object) -> bool:
    """Tell whether something is a URL (or a ``pipe:`` command) and no path."""
    return isinstance(item, str) and _URL.match(item) is not None


def list_shards(spec: ShardSpec) -> tuple[list[str], list[str]]:
    """Find the shard files that are meant.

    A path that exists is taken as it is, whatever characters it holds. In others ``{000000..000099}`` and ``{a,b}``
    stand for each of their values, ``*``, ``?`` and ``[...]`` for the files that match.

    Args:
        spec: A folder (all its ``.tar`` files), a file, a pattern, or a list of these.

    Returns:
        Paths of shards that exist, sorted as text, and those that were named but do not exist.

    Raises:
        SourceError: Nothing matches, or one file is meant twice.
    """
    items = [spec] if isinstance(spec, str | Path) else list(spec)
    found: list[str] = []
    missing: list[str] = []
    for item in items:
        for path, exists in _resolve(str(item)):
            (found if exists else missing).append(path)
    if not found and not missing:
        raise SourceError(str(spec), "no shards", "at least one .tar file")
    found.sort()
    for one, other in pairwise(found):
        if one == other:
            raise SourceError(one, "named twice", "each shard once", "Its samples would come twice in every epoch.")
    return found, missing


def missing_shards_error(spec: ShardSpec, missing: Sequence[str], found: int) -> ShardError:
    """Return the error that names shards which are not there."""
    names = ", ".join(missing[:_MOST_NAMED]) + (
        f" and {len(missing) - _MOST_NAMED} more" * (len(missing) > _MOST_NAMED)
    )
    return ShardError(
        str(spec),
        f"{len(missing)} of {counted(len(missing) + found, 'shard')} missing: {names}",
        "every shard of the range",
        "Restore them, or list the shards that are there.",
    )


def _resolve(text: str) -> Iterator[tuple[str, bool]]:
    if os.path.isdir(text):
        names = sorted(name for name in os.listdir(text) if name.endswith(".tar") and not name.startswith("."))
        if not names:
            raise SourceError(text, "no .tar file in this folder", "a folder of shards")
        yield from ((os.path.join(text, name), True) for name in names)
    elif os.path.exists(text):
        yield text, True
    else:
        yield from _expand_pattern(text)


def _expand_pattern(text: str) -> Iterator[tuple[str, bool]]:
    if not _BRACES.search(text) and not glob.has_magic(text):
        raise SourceError(text, "no such file or folder", "shards")
    any_match = False
    expanded = list(_expand_braces(text))
    for path in expanded:
        if os.path.exists(path):
            any_match = True
            yield path, True
        elif glob.has_magic(path):
            for match in sorted(glob.glob(path)):
                any_match = True
                yield match, True
        elif len(expanded) > 1:
            yield path, False
    if not any_match:
        raise SourceError(text, "no file matches this pattern", "shards")


def _expand_braces(text: str) -> Iterator[str]:
    match = _BRACES.search(text)
    if match is None:
        yield text
        return
    inside = match.group(1)
    numbers = _RANGE.fullmatch(inside)
    if numbers:
        low, high = numbers.groups()
        values = [f"{n:0{len(low)}d}" for n in range(int(low), int(high) + 1)]
    else:
        values = inside.split(",")
    for value in values:
        for rest in _expand_braces(text[match.end() :]):
            yield text[: match.start()] + value + rest
