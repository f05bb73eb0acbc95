"""Brings the page cache into the state that a row claims, and says what it really is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil

from fastdata.measure import Cache
from fastdata.pagecache import data_files, drop, read_all, resident_percent, total_bytes

WARM_PERCENT = 99.0
COLD_PERCENT = 1.0
MEMORY_SHARE = 0.7
"""Data up to this share of the free memory are read into the page cache before a warm row."""


class CacheKeeper:
    """Remembers the files of each data set, so that they are listed once."""

    def __init__(self) -> None:
        """Know nothing yet."""
        self._files: dict[str, list[Path] | None] = {}

    def prepare(self, data: str, wanted: Cache) -> dict[str, Any]:
        """Warm or drop the files, look, and return ``cache``, ``resident_percent`` (or None) and ``note``.

        Args:
            data: What the pipeline opens.
            wanted: "warm": every file is read once, where memory holds them. "cold": their pages are dropped.
        """
        if data not in self._files:
            self._files[data] = data_files(data)
        files = self._files[data]
        if files is None:
            return {"cache": "warm", "resident_percent": None, "note": "remote data have no page cache"}
        return _cold(files) if wanted == "cold" else _warm(files)


def _warm(files: list[Path]) -> dict[str, Any]:
    state = resident_percent(files)
    if state.value is not None and state.value >= WARM_PERCENT:
        return {"cache": "warm", "resident_percent": state.value, "note": ""}
    size, free = total_bytes(files), psutil.virtual_memory().available
    if size > MEMORY_SHARE * free:
        note = f"{size / 1e9:.1f} GB of data do not fit into {free / 1e9:.1f} GB of free memory: a part comes from disk"
        return {"cache": "warm", "resident_percent": state.value, "note": note}
    read_all(files)
    state = resident_percent(files)
    return {"cache": "warm", "resident_percent": state.value, "note": state.reason}


def _cold(files: list[Path]) -> dict[str, Any]:
    try:
        drop(files)
    except (OSError, AttributeError) as exc:
        return {"cache": "warm", "resident_percent": resident_percent(files).value, "note": f"not dropped: {exc}"}
    state = resident_percent(files)
    if state.value is None:
        return {"cache": "cold", "resident_percent": None, "note": f"dropped, but not verified: {state.reason}"}
    if state.value > COLD_PERCENT:
        note = f"asked to be cold, but {state.value:.0f} % of the pages stayed in the page cache"
        return {"cache": "warm", "resident_percent": state.value, "note": note}
    return {"cache": "cold", "resident_percent": state.value, "note": ""}
