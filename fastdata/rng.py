"""Draws from (seed, epoch, id): pure functions, the same on every backend, worker count, rank and resume.

A draw never depends on what was drawn before it, so nothing has to be stored, replayed or kept in step. The generator
is counter-based: SplitMix64's finaliser (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014)
over a key of (seed, epoch, id, stream) plus a counter.
"""

from __future__ import annotations

import functools
import math

import numpy as np
from numpy.typing import NDArray

from fastdata.transforms import RandomResizedCrop

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)

# One stream per use, so that adding a transform never changes what the others draw. Never renumber.
STREAM_ORDER = 1
STREAM_WINDOW = 2
STREAM_FLIP = 3
STREAM_COLOR = 16  # plus the transform's place among the colour transforms
STREAM_ERASING = 4
STREAM_CALLABLE = 5
STREAM_BATCH = 6

_ATTEMPTS = 10  # torchvision's RandomResizedCrop gives up after ten draws and takes the central window


def mix64(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return SplitMix64's bijective finaliser of each value: (n,) uint64 to (n,) uint64."""
    with np.errstate(over="ignore"):
        x = values.astype(np.uint64, copy=True)
        x ^= x >> np.uint64(30)
        x *= _MIX_1
        x ^= x >> np.uint64(27)
        x *= _MIX_2
        x ^= x >> np.uint64(31)
    return x


def keys(seed: int, epoch: int, ids: NDArray[np.int64], stream: int) -> NDArray[np.uint64]:
    """Return one 64-bit key for each id of one use.

    Args:
        seed: Any int; taken modulo 2**64.
        epoch: The epoch's number, >= 0.
        ids: (n,) int64 sample ids.
        stream: One of this module's ``STREAM_`` constants.

    Returns:
        (n,) uint64.
    """
    base = scalar_key(seed, epoch, stream)
    with np.errstate(over="ignore"):
        return mix64(base + ids.astype(np.uint64) * _GOLDEN)


@functools.lru_cache(maxsize=256)  # a chunk of samples asks for those of its epoch: 25 us each
def scalar_key(*parts: int) -> np.uint64:
    """Return one key of a few integers, each taken modulo 2**64; order matters."""
    key = np.zeros(1, np.uint64)
    with np.errstate(over="ignore"):
        for part in parts:
            key = mix64(key + _GOLDEN + np.uint64(part % 2**64))
    return np.uint64(key[0])


def uniforms(sample_keys: NDArray[np.uint64], count: int) -> NDArray[np.float64]:
    """Return `count` independent uniform numbers in [0, 1) for each key: (n, count) float64, 53 random bits each."""
    with np.errstate(over="ignore"):
        counters = np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN
        bits = mix64(sample_keys[:, None] + counters[None, :])
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def draw_flips(seed: int, epoch: int, ids: NDArray[np.int64], p: float) -> NDArray[np.bool_]:
    """Return (n,) bool: which samples are mirrored, each with probability `p`."""
    return uniforms(keys(seed, epoch, ids, STREAM_FLIP), 1)[:, 0] < p


def draw_windows(
    seed: int,
    epoch: int,
    ids: NDArray[np.int64],
    widths: NDArray[np.int64],
    heights: NDArray[np.int64],
    crop: RandomResizedCrop,
) -> NDArray[np.int64]:
    """Draw the random window of each picture by torchvision's rule (``RandomResizedCrop.get_params``).

    Args:
        seed: The pipeline's seed.
        epoch: The epoch's number.
        ids: (n,) int64 sample ids.
        widths: (n,) int64 widths of the oriented pictures, in pixels.
        heights: (n,) int64 heights of the oriented pictures, in pixels.
        crop: The ranges of area and aspect.

    Returns:
        (n, 4) int64: top, left, height, width in pixels of the oriented picture, never empty, never outside.
    """
    return windows_from_uniforms(uniforms(keys(seed, epoch, ids, STREAM_WINDOW), 4 * _ATTEMPTS), widths, heights, crop)


def windows_from_uniforms(
    numbers: NDArray[np.float64], widths: NDArray[np.int64], heights: NDArray[np.int64], crop: RandomResizedCrop
) -> NDArray[np.int64]:
    """Turn (n, 40) uniform numbers into (n, 4) windows; see `draw_windows`."""
    n = len(widths)
    u = numbers.reshape(n, _ATTEMPTS, 4)
    w, h = widths.astype(np.int64)[:, None], heights.astype(np.int64)[:, None]
    area = (w * h) * (crop.scale[0] + (crop.scale[1] - crop.scale[0]) * u[..., 0])
    log_low, log_high = math.log(crop.ratio[0]), math.log(crop.ratio[1])
    aspect = np.exp(log_low + (log_high - log_low) * u[..., 1])
    window_w = np.rint(np.sqrt(area * aspect)).astype(np.int64)
    window_h = np.rint(np.sqrt(area / aspect)).astype(np.int64)
    fits = (window_w > 0) & (window_w <= w) & (window_h > 0) & (window_h <= h)
    first = fits.argmax(axis=1)
    rows = np.arange(n)
    chosen_w, chosen_h = window_w[rows, first], window_h[rows, first]
    w, h = w[:, 0], h[:, 0]
    top = np.minimum((u[rows, first, 2] * (h - chosen_h + 1)).astype(np.int64), h - chosen_h)
    left = np.minimum((u[rows, first, 3] * (w - chosen_w + 1)).astype(np.int64), w - chosen_w)
    windows = np.stack([top, left, chosen_h, chosen_w], axis=1)
    missed = ~fits.any(axis=1)
    if missed.any():
        windows[missed] = _central_windows(w[missed], h[missed], crop.ratio)
    return windows


def _central_windows(
    widths: NDArray[np.int64], heights: NDArray[np.int64], ratio: tuple[float, float]
) -> NDArray[np.int64]:
    """Torchvision's fallback: the largest central window whose aspect lies in the range, at least one pixel a side."""
    aspect = widths / heights
    w = np.where(aspect > ratio[1], np.rint(heights * ratio[1]).astype(np.int64), widths)
    h = np.where(aspect < ratio[0], np.rint(widths / ratio[0]).astype(np.int64), heights)
    w, h = np.clip(w, 1, widths), np.clip(h, 1, heights)
    return np.stack([(heights - h) // 2, (widths - w) // 2, h, w], axis=1)
