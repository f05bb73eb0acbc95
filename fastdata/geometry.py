"""Where the output pixels of each picture come from: windows for a batch, as arrays, before anything is decoded."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fastdata.resample import read_ranges
from fastdata.rng import draw_flips, draw_windows
from fastdata.transforms import Recipe, size_pair


@dataclass(frozen=True)
class Geometry:
    """Crop, resize and mirror of n pictures. Everything is in pixels of the oriented picture.

    On each axis the pixels ``low..high-1`` are resized to ``full`` pixels, of which ``offset..offset+size-1`` are
    wanted. A training recipe resizes its window and wants all of it; an evaluation recipe resizes the whole picture and
    wants its centre. So one form serves both, and a decoder learns from it which source pixels it needs.
    """

    low: NDArray[np.int64]
    """(n, 2) first source row and column that may be read."""
    high: NDArray[np.int64]
    """(n, 2) one past the last source row and column that may be read."""
    full: NDArray[np.int64]
    """(n, 2) height and width that ``low..high`` is resized to."""
    offset: NDArray[np.int64]
    """(n, 2) first wanted row and column of the resized picture."""
    output_size: tuple[int, int]
    """(height, width) of what is wanted, the same for all."""
    flips: NDArray[np.bool_]
    """(n,) whether the result is mirrored left and right."""


def plan_geometry(
    recipe: Recipe,
    seed: int,
    epoch: int,
    ids: NDArray[np.int64],
    widths: NDArray[np.int64],
    heights: NDArray[np.int64],
) -> Geometry:
    """Return crop, resize and mirror of each picture.

    Args:
        recipe: The checked transforms.
        seed: The pipeline's seed.
        epoch: The epoch's number.
        ids: (n,) int64 sample ids.
        widths: (n,) int64 widths of the oriented pictures.
        heights: (n,) int64 heights of the oriented pictures.
    """
    n = len(ids)
    sizes = np.stack([heights, widths], axis=1).astype(np.int64)
    low = np.zeros((n, 2), np.int64)
    offset = np.zeros((n, 2), np.int64)
    wanted = np.array(recipe.output_size, np.int64)
    if recipe.crop is not None:
        windows = draw_windows(seed, epoch, ids, widths, heights, recipe.crop)
        low, high = windows[:, :2], windows[:, :2] + windows[:, 2:]
        full = np.broadcast_to(wanted, (n, 2)).copy()
    else:
        assert recipe.resize is not None  # sort_recipe refuses recipes with neither
        high = sizes
        full = resized_sizes(sizes, recipe.resize.size)
        if recipe.center_crop is not None:
            # torchvision's center_crop: int(round((h - crop_h) / 2.0)), and Python and NumPy round halves to even alike
            offset = np.rint((full - wanted) / 2.0).astype(np.int64)
    flips = np.zeros(n, np.bool_) if recipe.flip is None else draw_flips(seed, epoch, ids, recipe.flip.p)
    return Geometry(low, high, full, offset, recipe.output_size, flips)


def upright_sizes(
    widths: NDArray[np.int64], heights: NDArray[np.int64], orientations: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return (widths, heights) of pictures after their EXIF turn: 5..8 swap the sides."""
    swapped = orientations >= 5
    return np.where(swapped, heights, widths), np.where(swapped, widths, heights)


def needed_windows(geometry: Geometry) -> NDArray[np.int64]:
    """Return the pixels that the resize reads of each picture: (n, 4) top, left, height, width, upright."""
    wanted = np.array(geometry.output_size, np.int64)
    begin, end = read_ranges(geometry.low, geometry.high, geometry.full, geometry.offset, wanted)
    return np.concatenate([begin, end - begin], axis=1)


def choose_reductions(geometry: Geometry) -> NDArray[np.int64]:
    """Return how far a decoder may reduce each picture.

    Returns:
        (n,) the largest of 1, 2, 4 and 8 that leaves the window at least as large as what it is resized to, on both
        axes.
    """
    shrink: NDArray[np.int64] = ((geometry.high - geometry.low) // geometry.full).min(axis=1)
    reductions: NDArray[np.int64] = 1 + (shrink >= 2) + 2 * (shrink >= 4) + 4 * (shrink >= 8)
    return reductions


def reduced_windows(
    needed: NDArray[np.int64], sizes: NDArray[np.int64], reductions: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Widen windows to whole pixels of the reduced picture, and by those that its filter may read besides.

    Args:
        needed: (n, 4) from `needed_windows`.
        sizes: (n, 2) heights and widths of the pictures, padded to multiples of the reduction.
        reductions: (n,) from `choose_reductions`; windows of 1 stay as they are.

    Returns:
        (n, 4) top, left, height, width; all multiples of the reduction.
    """
    step = reductions[:, None]
    margin = np.where(step > 1, 2 * step, 0)  # rounding of a filter's range takes one pixel, upsampling of chroma one
    begin = np.maximum(needed[:, :2] - margin, 0) // step * step
    end = np.minimum((needed[:, :2] + needed[:, 2:] + margin + step - 1) // step * step, sizes)
    return np.concatenate([begin, end - begin], axis=1)


def resized_sizes(sizes: NDArray[np.int64], size: int | tuple[int, int]) -> NDArray[np.int64]:
    """Return what `Resize` makes of pictures: (n, 2) heights and widths to (n, 2), by torchvision's rule.

    An int is the short side; the long side is int(size * long / short).
    """
    if not isinstance(size, int):
        return np.broadcast_to(np.array(size_pair(size), np.int64), sizes.shape).copy()
    short = sizes.min(axis=1, keepdims=True)
    scaled = (size * sizes / short).astype(np.int64)
    return np.where(sizes == short, size, scaled)
