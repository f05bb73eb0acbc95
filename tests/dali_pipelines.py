"""Small "dali" pipelines of numbered pictures, for the tests of their life and of their failures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fastdata
from fastdata.testing import ids_in_pixels


def open_dali(root: Path, **arguments: Any) -> fastdata.Pipeline:
    """Open a small uint8 pipeline without augmentation."""
    settings: dict[str, Any] = {
        "transform": (fastdata.Resize((32, 32)),), "batch_size": 8, "dtype": "uint8", "workers": 2,
    }  # fmt: skip
    return fastdata.open_pipeline(root, backend="dali", **(settings | arguments))


def check_pixels(batch: fastdata.Batch) -> list[int]:
    """Return a batch's ids, after comparing them with those that its pixels tell."""
    ids: list[int] = batch.ids.tolist()
    assert ids_in_pixels(batch.images) == ids
    return ids


def epoch_ids(loader: fastdata.Pipeline) -> list[int]:
    """Load one epoch, check its pixels, and return its ids in order."""
    return [i for batch in loader for i in check_pixels(batch)]
