"""Folders of pictures to test loaders on: numbered ones, whose colour tells the id, and varied ones; and damage."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image

CLASSES = ("ant", "bee", "cat", "dog")


def write_numbered_folder(root: Path, per_class: int, size: tuple[int, int] = (64, 48)) -> Path:
    """Write ``root/{ant,bee,cat,dog}/0000.jpg ...``: flat pictures whose colour tells their id.

    Args:
        root: The folder to make.
        per_class: Pictures a class; at most 64, so that all ids stay below 256.
        size: (width, height) in pixels.
    """
    for label, name in enumerate(CLASSES):
        folder = root / name
        folder.mkdir(parents=True)
        for number in range(per_class):
            sample_id = label * per_class + number
            Image.new("RGB", size, color_of(sample_id)).save(folder / f"{number:04d}.jpg", quality=95)
    return root


def color_of(sample_id: int) -> tuple[int, int, int]:
    """Return the colour that tells an id below 256."""
    return 8 + 16 * (sample_id % 16), 8 + 16 * (sample_id // 16), 128


def ids_in_pixels(images: torch.Tensor) -> list[int]:
    """Read the ids back from a uint8 batch (n, 3, H, W) of numbered pictures."""
    middle = images[:, :, images.shape[2] // 2, images.shape[3] // 2].cpu().to(torch.int64)
    return [int(r) // 16 + 16 * (int(g) // 16) for r, g, _ in middle]


def varied_chroma(sample_id: int) -> str:
    """Return how `write_varied_folder` samples the chroma of a picture: "gray", "444", "422" or "420"."""
    return "gray" if sample_id % 8 == 3 else ("444", "422", "420")[sample_id % 3]


def write_varied_folder(root: Path) -> Path:
    """Write 24 JPEGs in 4 classes: smooth structure, sizes 40..300, all usual chroma samplings, progressive, gray."""
    rng = np.random.default_rng(7)
    number = 0
    for name in CLASSES:
        (root / name).mkdir(parents=True)
        for index in range(6):
            height, width = (int(x) for x in rng.integers(40, 300, 2))
            coarse = rng.integers(0, 256, (height // 16 + 2, width // 16 + 2, 3), dtype=np.uint8)
            picture = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
            picture.convert("L" if varied_chroma(number) == "gray" else "RGB").save(
                root / name / f"{index}.jpg", quality=90, subsampling=number % 3, progressive=number % 5 == 4
            )
            number += 1
    return root


def corrupt(path: Path) -> Path:
    """Overwrite a file with text that no decoder takes; return its path."""
    path.write_bytes(b"<html>404</html>")
    return path
