"""Owns the one resize of the package: antialiased bilinear, bit for bit as Pillow's ``Image.resize(size, BILINEAR)``.

Pillow filters along the rows, rounds to 8 bits, then filters along the columns (in some cases the other way round),
both with 22-bit integer weights (``src/libImaging/Resample.c``). So does this module, in vectors: down the columns a
sum takes contiguous memory as it is; along the rows, blocks of 16 rows are transposed, summed likewise, and transposed
back. The mirror costs nothing: the pass along the rows writes its pixels from the other end.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fastdata.errors import UsageError
from fastdata.resample_kernel import AXIS_FIELDS, FLIP, PLAN_FIELDS, REDUCTION, resample


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a resize: the pixels [low, high) of the picture become `full` pixels, of which `size` are wanted.

    The members are integers since Pillow's result hangs on the order in which its floats are computed. A crop followed
    by a resize is ``Axis(top, top + height, 224, 0, 224)``; a resize of all `height` rows to 256 followed by a crop of
    224 is ``Axis(0, height, 256, 16, 224)``.
    """

    low: int
    """First pixel of the picture that may be read."""
    high: int
    """Pixel after the last that may be read; above `low`."""
    full: int
    """Pixels that [low, high) is resized to, >= 1."""
    first: int
    """First wanted pixel of `full`, 0 <= first."""
    size: int
    """Number of wanted pixels, >= 1, first + size <= full."""

    def __post_init__(self) -> None:
        """Check that the axis is not empty and that the wanted pixels exist."""
        if not (0 <= self.low < self.high and 0 <= self.first < self.first + self.size <= self.full):
            raise UsageError("Axis", f"{self!r}", "0 <= low < high and 0 <= first < first + size <= full")


def read_range(axis: Axis) -> tuple[int, int]:
    """Return the half-open range of picture pixels that the filter reads for the wanted pixels of an axis."""
    length = axis.high - axis.low
    scale = length / axis.full
    support = max(scale, 1.0)
    begin = int((axis.first + 0.5) * scale - support + 0.5)
    end = int((axis.first + axis.size - 1 + 0.5) * scale + support + 0.5)
    return axis.low + max(begin, 0), axis.low + min(end, length)


def read_ranges(
    low: NDArray[np.int64],
    high: NDArray[np.int64],
    full: NDArray[np.int64] | int,
    first: NDArray[np.int64] | int,
    size: NDArray[np.int64] | int,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return `read_range` of many axes at once; the arguments are the members of `Axis`, (n,) int64 or one value.

    Returns:
        begin, end: (n,) int64 each, half-open.
    """
    length = high - low
    scale = length / full
    support = np.maximum(scale, 1.0)
    begin = ((first + 0.5) * scale - support + 0.5).astype(np.int64)
    end = ((first + size - 1 + 0.5) * scale + support + 0.5).astype(np.int64)
    return low + np.maximum(begin, 0), low + np.minimum(end, length)


def plan_resamples(
    low: NDArray[np.int64],
    high: NDArray[np.int64],
    full: NDArray[np.int64],
    first: NDArray[np.int64],
    size: tuple[int, int],
    flips: NDArray[np.bool_],
    reduction: NDArray[np.int64] | int = 1,
) -> NDArray[np.int64]:
    """Lay out what `resample_planned` needs to know of n pictures; one column means rows, the other columns.

    Args:
        low: (n, 2) as `Axis.low`, in pixels of the picture before any reduction.
        high: (n, 2) as `Axis.high`.
        full: (n, 2) as `Axis.full`.
        first: (n, 2) as `Axis.first`.
        size: (height, width) of the results, as `Axis.size`.
        flips: (n,) whether to mirror left and right.
        reduction: (n,) or one value: pixels of the picture, across and down, that a decoder made into one.

    Returns:
        (n, fields) int64, a row for each picture.
    """
    plans = np.empty((len(low), PLAN_FIELDS), np.int64)
    for axis in range(2):
        at = axis * AXIS_FIELDS
        for field, values in enumerate((low, high, full, first)):
            plans[:, at + field] = values[:, axis]
        plans[:, at + 4] = size[axis]
    plans[:, FLIP] = flips
    plans[:, REDUCTION] = reduction
    return plans


def resample_planned(
    image: NDArray[np.uint8],
    origin: tuple[int, int],
    plans: NDArray[np.int64],
    row: int,
    out: NDArray[np.uint8],
    index: int,
) -> None:
    """Resize a picture, or the part of it that is there, into a slot of a batch. Runs without the GIL.

    One flat call with checks and ranges inside: what holds the GIL takes about two microseconds.

    Args:
        image: (h, w, 3) uint8, C-contiguous; all of the picture, reduced as planned, or a rectangle of it.
        origin: (top, left) of `image` in the reduced picture.
        plans: From `plan_resamples`.
        row: Which of `plans` this is. `image` must hold the pixels that its filter reads.
        out: (m, height, width, 3) uint8, C-contiguous.
        index: Which of `out` is written.

    Raises:
        UsageError: A shape, dtype or layout is another, or `image` lacks pixels that the filter reads.
    """
    fits = image.dtype == np.uint8 and out.dtype == np.uint8 and image.ndim == 3 and out.ndim == 4
    if fits and image.flags.carray and out.flags.carray:
        for _ in range(2):
            missing_bytes = resample(image, origin[0], origin[1], plans, row, out, index, _scratch.memory)
            if missing_bytes == 0:
                return
            if missing_bytes < 0:
                break
            _scratch.memory = np.empty(missing_bytes + missing_bytes // 4, np.uint8)
    raise _refusal(image, origin, plans[row].tolist(), out)


def resample_into(
    image: NDArray[np.uint8],
    origin: tuple[int, int],
    rows: Axis,
    columns: Axis,
    out: NDArray[np.uint8],
    *,
    flip: bool = False,
) -> None:
    """Resize one picture, or the part of it that is there, into a slot of a batch. Runs without the GIL.

    Args:
        image: (h, w, 3) uint8; all of the picture or a rectangle of it. Copied where it is not C-contiguous.
        origin: (top, left) of `image` in the picture.
        rows: What becomes of the rows. `image` must hold ``read_range(rows)``.
        columns: What becomes of the columns. `image` must hold ``read_range(columns)``.
        out: (rows.size, columns.size, 3) uint8, C-contiguous. Written.
        flip: Mirror left and right.

    Raises:
        UsageError: A shape, dtype or layout is another, or `image` lacks pixels that the filter reads.
    """
    low, high, full, first = (
        np.array([[getattr(rows, name), getattr(columns, name)]]) for name in ("low", "high", "full", "first")
    )
    plans = plan_resamples(low, high, full, first, (rows.size, columns.size), np.array([flip]))
    resample_planned(_owned(image), origin, plans, 0, out[None], 0)


def _owned(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the array itself, or a copy where kernels, compiled for one layout, cannot take it."""
    return image if image.flags.carray else np.array(image, order="C")


def _refusal(image: NDArray[np.uint8], origin: tuple[int, int], plan: list[int], out: NDArray[np.uint8]) -> UsageError:
    """Return what `resample_planned` finds wrong with its arguments."""
    shapes = (("image", image, image.shape[-3:]), ("out", out, (*out.shape[:1], plan[4], plan[AXIS_FIELDS + 4], 3)))
    for name, array, wanted in shapes:
        fits = array.dtype == np.uint8 and array.shape == wanted and array.shape[-1] == 3 and array.flags.carray
        if not fits or array.ndim != len(wanted):
            found = f"{array.dtype} {array.shape}, strides {array.strides}"
            size = "(h, w, 3)" if name == "image" else wanted
            return UsageError(name, found, f"writable C-contiguous uint8 {size}")
    top, left = origin
    axes = Axis(*plan[:AXIS_FIELDS]), Axis(*plan[AXIS_FIELDS : 2 * AXIS_FIELDS])
    needed = "at least rows {}:{}, columns {}:{}".format(*read_range(axes[0]), *read_range(axes[1]))
    return UsageError(
        "image",
        f"rows {top}:{top + image.shape[0]}, columns {left}:{left + image.shape[1]}",
        needed + (f" before a reduction by {plan[REDUCTION]}" if plan[REDUCTION] > 1 else ""),
    )


class _Scratch(threading.local):
    """The work memory of a thread. It grows to what the largest picture needed and is kept: fresh pages cost more."""

    def __init__(self) -> None:
        self.memory = np.empty(1 << 20, np.uint8)


_scratch = _Scratch()
