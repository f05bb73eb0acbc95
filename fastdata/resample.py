"""Owns the one resize of the package: antialiased bilinear, bit for bit as Pillow's ``Image.resize(size, BILINEAR)``.

Pillow filters along the rows, rounds to 8 bits, then filters along the columns (in some cases the other way round),
both with 22-bit integer weights (``src/libImaging/Resample.c``). So does this module, in vectors: down the columns a
sum takes contiguous memory as it is; along the rows, blocks of 16 rows are transposed, summed likewise, and transposed
back. The mirror costs nothing: the pass along the rows writes its pixels from the other end.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from fastdata._native import compiled, copy_bytes, helper, inlined
from fastdata.errors import UsageError

# ruff: noqa: ARG001  (numba fixes the parameters of an intrinsic and of its generator)

_WEIGHT_BITS = 32 - 8 - 2
"""Pillow's PRECISION_BITS: an 8-bit pixel times a weight, plus two bits of room in 32."""
_LANES = 16
"""Rows of a block, and bytes that a transposition moves at once."""
_PIXEL_BYTES = 3 * _LANES
"""One pixel of a transposed block: 16 rows of each channel; also the granule of a row in the second pass."""
_AXIS_FIELDS = 5
"""Of a plan's rows, then of its columns: the members of `Axis`."""
_FLIP, _REDUCTION, _PLAN_FIELDS = 10, 11, 12


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
    plans = np.empty((len(low), _PLAN_FIELDS), np.int64)
    for axis in range(2):
        at = axis * _AXIS_FIELDS
        for field, values in enumerate((low, high, full, first)):
            plans[:, at + field] = values[:, axis]
        plans[:, at + 4] = size[axis]
    plans[:, _FLIP] = flips
    plans[:, _REDUCTION] = reduction
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
            missing_bytes = _resample_planned(image, origin[0], origin[1], plans, row, out, index, _scratch.memory)
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
    shapes = (("image", image, image.shape[-3:]), ("out", out, (*out.shape[:1], plan[4], plan[_AXIS_FIELDS + 4], 3)))
    for name, array, wanted in shapes:
        fits = array.dtype == np.uint8 and array.shape == wanted and array.shape[-1] == 3 and array.flags.carray
        if not fits or array.ndim != len(wanted):
            found = f"{array.dtype} {array.shape}, strides {array.strides}"
            size = "(h, w, 3)" if name == "image" else wanted
            return UsageError(name, found, f"writable C-contiguous uint8 {size}")
    top, left = origin
    axes = Axis(*plan[:_AXIS_FIELDS]), Axis(*plan[_AXIS_FIELDS : 2 * _AXIS_FIELDS])
    needed = "at least rows {}:{}, columns {}:{}".format(*read_range(axes[0]), *read_range(axes[1]))
    return UsageError(
        "image",
        f"rows {top}:{top + image.shape[0]}, columns {left}:{left + image.shape[1]}",
        needed + (f" before a reduction by {plan[_REDUCTION]}" if plan[_REDUCTION] > 1 else ""),
    )


class _Scratch(threading.local):
    """The work memory of a thread. It grows to what the largest picture needed and is kept: fresh pages cost more."""

    def __init__(self) -> None:
        self.memory = np.empty(1 << 20, np.uint8)


_scratch = _Scratch()


@intrinsic
def _transpose(typing_context: Any, to: Any, to_stride: Any, source: Any, offsets: Any) -> Any:
    """Transpose 16 x 16 bytes: row i is read at ``source + offsets[i]``, column i written at ``to + i * to_stride``."""
    signature = types.void(types.intp, types.intp, types.intp, types.intp)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        to, to_stride, source, offsets = arguments
        word, index = ir.IntType(64), ir.IntType(32)
        vector = ir.VectorType(ir.IntType(8), _LANES)
        table = builder.inttoptr(offsets, word.as_pointer())
        parts = []
        for lane in range(_LANES):
            offset = builder.load(builder.gep(table, [ir.Constant(index, lane)]))
            parts.append(builder.load(builder.inttoptr(builder.add(source, offset), vector.as_pointer()), align=1))
        # Seen as one array of 256 bytes, interleaving its halves rotates the 8 bits of an address by one; after four
        # rounds the row and column halves of the address have changed places.
        half = _LANES // 2
        masks = [
            ir.Constant(ir.VectorType(index, _LANES), [begin + i // 2 + _LANES * (i % 2) for i in range(_LANES)])
            for begin in (0, half)
        ]
        for _ in range(4):
            parts = [builder.shuffle_vector(parts[i], parts[i + half], mask) for i in range(half) for mask in masks]
        for lane, part in enumerate(parts):
            address = builder.add(to, builder.mul(to_stride, ir.Constant(word, lane)))
            builder.store(part, builder.inttoptr(address, vector.as_pointer()), align=1)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def _weighted_sum(typing_context: Any, to: Any, source: Any, step: Any, weights: Any, taps: Any) -> Any:
    """Write 48 bytes at `to`: the sum over t < taps of weights[t] (int32) * the 48 bytes at ``source + t * step``."""
    signature = types.void(types.intp, types.intp, types.intp, types.intp, types.intp)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        to, source, step, weights, taps = arguments
        word, number, index = ir.IntType(64), ir.IntType(32), ir.IntType(32)
        narrow, wide = ir.VectorType(ir.IntType(8), _LANES), ir.VectorType(number, _LANES)
        groups = range(_PIXEL_BYTES // _LANES)

        def splat(value: Any) -> Any:
            one = builder.insert_element(ir.Constant(wide, ir.Undefined), value, ir.Constant(index, 0))
            return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(index, _LANES), [0] * _LANES))

        def all_lanes(value: int) -> Any:
            return ir.Constant(wide, [value] * _LANES)

        before = builder.block
        loop, after = builder.append_basic_block("tap"), builder.append_basic_block("taps_done")
        builder.branch(loop)
        builder.position_at_end(loop)
        tap, address = builder.phi(word), builder.phi(word)
        sums = [builder.phi(wide) for _ in groups]
        tap.add_incoming(ir.Constant(word, 0), before)
        address.add_incoming(source, before)
        table = builder.inttoptr(weights, number.as_pointer())
        weight = splat(builder.load(builder.gep(table, [tap])))
        totals = []
        for group in groups:
            place = builder.add(address, ir.Constant(word, group * _LANES))
            pixels = builder.load(builder.inttoptr(place, narrow.as_pointer()), align=1)
            totals.append(builder.add(sums[group], builder.mul(builder.zext(pixels, wide), weight)))
        following = builder.add(tap, ir.Constant(word, 1))
        tap.add_incoming(following, loop)
        address.add_incoming(builder.add(address, step), loop)
        for group in groups:
            sums[group].add_incoming(all_lanes(1 << (_WEIGHT_BITS - 1)), before)  # rounds to nearest
            sums[group].add_incoming(totals[group], loop)
        builder.cbranch(builder.icmp_signed("<", following, taps), loop, after)
        builder.position_at_end(after)
        for group, total in zip(groups, totals, strict=True):
            value = builder.lshr(total, all_lanes(_WEIGHT_BITS))
            most = all_lanes(255)
            clipped = builder.select(builder.icmp_unsigned("<", value, most), value, most)
            place = builder.add(to, ir.Constant(word, group * _LANES))
            builder.store(builder.trunc(clipped, narrow), builder.inttoptr(place, narrow.as_pointer()), align=1)
        return context.get_dummy_value()

    return signature, generate


@inlined
def _address(array: Any) -> Any:
    """Return where an array lies, signed: numba adds uint64 and int64 as floats."""
    return np.intp(array.ctypes.data)


@helper
def _axis_weights(axis: Any) -> Any:
    """Return Pillow's filter of an axis: each output pixel's first source pixel, and its (size, taps) int32 weights.

    All rows of the table are as long as the longest, padded with zeros: a loop of one length is predicted. Source
    pixels count from the first that is read, and ``begins + taps`` never passes the last.
    """
    read_first, read_end, length, _, first, size, start, scale = axis
    support = max(scale, 1.0)
    begins = np.empty(size, np.int64)
    counts = np.empty(size, np.int64)
    taps = 1
    for i in range(size):
        centre = start + (first + i + 0.5) * scale
        begins[i] = max(int(centre - support + 0.5), 0)
        counts[i] = min(int(centre + support + 0.5), length) - begins[i]
        taps = max(taps, counts[i])
    weights = np.zeros((size, taps), np.int32)
    shares = np.empty(taps, np.float64)
    inverse = 1.0 / support
    for i in range(size):
        centre = start + (first + i + 0.5) * scale
        total = 0.0
        for t in range(counts[i]):
            shares[t] = max(1.0 - abs((t + begins[i] - centre + 0.5) * inverse), 0.0)
            total += shares[t]
        shift = max(begins[i] + taps - read_end, 0)
        for t in range(counts[i]):
            weights[i, shift + t] = int(0.5 + shares[t] / total * (1 << _WEIGHT_BITS))
        begins[i] -= shift + read_first
    return begins, weights


@helper
def _filter_rows(
    source: Any, source_stride: Any, height: Any, width: Any, begins: Any, weights: Any, flip: Any, to: Any,
    to_stride: Any, block: Any,
) -> None:  # fmt: skip
    """Filter along each row, 16 rows at a time. Writes `height` and `len(begins)` rounded up to 16; `width` >= 16."""
    size, taps = weights.shape
    block_result = block + width * _PIXEL_BYTES
    weights_at = _address(weights)
    source_offsets = np.empty(_LANES, np.int64)
    result_offsets = np.arange(_LANES) * _LANES
    last = width * 3 - _LANES
    for row in range(0, height, _LANES):
        for lane in range(_LANES):
            source_offsets[lane] = min(row + lane, height - 1) * source_stride
        for begin in range(0, last + _LANES, _LANES):
            byte = min(begin, last)
            _transpose(block + byte * _LANES, _LANES, source + byte, _address(source_offsets))
        for x in range(size):
            place = size - 1 - x if flip else x
            _weighted_sum(
                block_result + place * _PIXEL_BYTES, block + begins[x] * _PIXEL_BYTES, _PIXEL_BYTES,
                weights_at + x * taps * 4, taps,
            )  # fmt: skip
        for byte in range(0, size * 3, _LANES):
            _transpose(to + row * to_stride + byte, to_stride, block_result + byte * _LANES, _address(result_offsets))


@helper
def _filter_columns(
    source: Any, source_stride: Any, row_bytes: Any, begins: Any, weights: Any, to: Any, to_stride: Any
) -> None:  # fmt: skip
    """Filter along each column; `row_bytes` >= 48."""
    size, taps = weights.shape
    weights_at = _address(weights)
    last = row_bytes - _PIXEL_BYTES
    for y in range(size):
        for begin in range(0, last + _PIXEL_BYTES, _PIXEL_BYTES):
            byte = min(begin, last)
            _weighted_sum(
                to + y * to_stride + byte, source + begins[y] * source_stride + byte, source_stride,
                weights_at + y * taps * 4, taps,
            )  # fmt: skip


@helper
def _resample(
    image: Any, image_stride: Any, rows: Any, columns: Any, flip: Any, out: Any, scratch: Any
) -> None:  # fmt: skip
    """Run both passes. `image` is the address of the first pixel that is read; `out` and `scratch` are addresses too.

    `rows` and `columns`: what `_axis` returns but its first.
    """
    height, width = rows[1] - rows[0], columns[1] - columns[0]
    out_height, out_width = rows[5], columns[5]
    row_begins, row_weights = _axis_weights(rows)
    column_begins, column_weights = _axis_weights(columns)
    result_stride = (out_width + _LANES - 1) // _LANES * _PIXEL_BYTES
    free = scratch
    # Pillow 13 filters along the columns first where the height shrinks far more than the width; before, it never did
    # (python-pillow/Pillow#9549). It shows, by one grey level here and there, since the first pass rounds. The rule
    # of 13 holds here whatever version is installed.
    fewer_rows, fewer_columns = rows[2] - rows[3], columns[2] - columns[3]
    columns_first = fewer_rows > 0 and fewer_rows > 2 * fewer_columns

    if width < _LANES:  # no vector fits into a row: move the rows apart; what lies between has no weight
        for row in range(height):
            copy_bytes(free + row * _PIXEL_BYTES, image + row * image_stride, width * 3)
        image, image_stride, width = free, _PIXEL_BYTES, _LANES
        free += height * _PIXEL_BYTES
    block = free
    free += width * _PIXEL_BYTES + result_stride * _LANES
    exact = out_width % _LANES == 0 and out_height % _LANES == 0
    result = out
    if not exact:
        result = free
        free += (out_height + _LANES - 1) // _LANES * _LANES * result_stride

    if columns_first:
        _filter_columns(image, image_stride, width * 3, row_begins, row_weights, free, width * 3)
        _filter_rows(
            free, width * 3, out_height, width, column_begins, column_weights, flip, result, result_stride, block
        )
    else:
        _filter_rows(
            image, image_stride, height, width, column_begins, column_weights, flip, free, result_stride, block
        )
        _filter_columns(free, result_stride, result_stride, row_begins, row_weights, result, result_stride)
    if not exact:
        for y in range(out_height):
            copy_bytes(out + y * out_width * 3, result + y * result_stride, out_width * 3)


@helper
def _axis(plan: Any, reduction: Any) -> Any:
    """Return the first pixel that counts, of the reduced picture, and what the passes need, counted from there.

    That is: first read, end of read, pixels that count, full, first, size, where the window begins in the first pixel,
    and window pixels a full pixel.
    """
    low, high, full, first, size = plan[0], plan[1], plan[2], plan[3], plan[4]
    origin = low // reduction
    length = (high + reduction - 1) // reduction - origin
    start = low / reduction - origin
    scale = (high - low) / reduction / full
    support = max(scale, 1.0)
    begin = int(start + (first + 0.5) * scale - support + 0.5)
    end = int(start + (first + size - 1 + 0.5) * scale + support + 0.5)
    return origin, (max(begin, 0), min(end, length), length, full, first, size, start, scale)


@helper
def _scratch_bytes(height: Any, width: Any, out_height: Any, out_width: Any) -> Any:
    """Return what `_resample` needs: rows moved apart, a block and its result, the result, what lies between."""
    stride = (out_width + _LANES - 1) // _LANES * _PIXEL_BYTES
    width = max(width, _LANES)
    between = max((height + _LANES - 1) // _LANES * _LANES * stride, out_height * width * 3)
    return (height + width) * _PIXEL_BYTES + (_LANES + out_height + _LANES) * stride + between


@compiled
def _resample_planned(
    image: Any, top: Any, left: Any, plans: Any, row: Any, out: Any, index: Any, scratch: Any
) -> Any:  # fmt: skip
    """Resize and return 0; or do nothing and return the scratch bytes it takes, or -1 for arguments that do not fit."""
    plan = plans[row]
    row_origin, rows = _axis(plan, plan[_REDUCTION])
    column_origin, columns = _axis(plan[_AXIS_FIELDS:], plan[_REDUCTION])
    y, x = row_origin + rows[0] - top, column_origin + columns[0] - left
    read_height, read_width = rows[1] - rows[0], columns[1] - columns[0]
    height, width = image.shape[0], image.shape[1]
    if image.shape[2] != 3 or y < 0 or x < 0 or y + read_height > height or x + read_width > width:
        return -1
    out_height, out_width = rows[5], columns[5]
    if out.shape[1] != out_height or out.shape[2] != out_width or out.shape[3] != 3 or not 0 <= index < out.shape[0]:
        return -1
    need = _scratch_bytes(read_height, read_width, out_height, out_width)
    if scratch.size < need:
        return need
    _resample(
        _address(image) + (y * width + x) * 3, width * 3, rows, columns, plan[_FLIP] != 0,
        _address(out) + index * out_height * out_width * 3, _address(scratch),
    )  # fmt: skip
    return 0
