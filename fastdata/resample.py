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
from numba import njit, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from fastdata.errors import UsageError

# ruff: noqa: ARG001  (numba fixes the parameters of an intrinsic and of its generator)
_intrinsic: Any = intrinsic  # numba's annotation takes the typing context for a parameter of the call

_WEIGHT_BITS = 32 - 8 - 2
"""Pillow's PRECISION_BITS: an 8-bit pixel times a weight, plus two bits of room in 32."""
_LANES = 16
"""Rows of a block, and bytes that a transposition moves at once."""
_PIXEL_BYTES = 3 * _LANES
"""One pixel of a transposed block: 16 rows of each channel; also the granule of a row in the second pass."""


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


def resample_into(
    image: NDArray[np.uint8],
    origin: tuple[int, int],
    rows: Axis,
    columns: Axis,
    out: NDArray[np.uint8],
    *,
    flip: bool = False,
) -> None:
    """Resize a picture, or the part of it that is there, into a slot of a batch. Runs without the GIL.

    Args:
        image: (h, w, 3) uint8, pixels contiguous within a row; all of the picture or a rectangle of it.
        origin: (top, left) of `image` in the picture.
        rows: What becomes of the rows. `image` must hold ``read_range(rows)``.
        columns: What becomes of the columns. `image` must hold ``read_range(columns)``.
        out: (rows.size, columns.size, 3) uint8, C-contiguous. Written.
        flip: Mirror left and right.

    Raises:
        UsageError: A shape, dtype or layout is another, or `image` lacks pixels that the filter reads.
    """
    top, bottom = read_range(rows)
    left, right = read_range(columns)
    height, width = _rgb_extent("image", image)
    if origin[0] > top or origin[1] > left or origin[0] + height < bottom or origin[1] + width < right:
        raise UsageError(
            "image", f"rows {origin[0]}:{origin[0] + height}, columns {origin[1]}:{origin[1] + width}",
            f"at least rows {top}:{bottom}, columns {left}:{right}",
        )  # fmt: skip
    if _rgb_extent("out", out) != (rows.size, columns.size) or not out.flags.c_contiguous or not out.flags.writeable:
        raise UsageError("out", f"{out.shape}", f"writable C-contiguous ({rows.size}, {columns.size}, 3)")
    stride = image.strides[0]
    _resample(
        image.ctypes.data + (top - origin[0]) * stride + (left - origin[1]) * 3,
        stride,
        (top - rows.low, bottom - rows.low, rows.high - rows.low, rows.full, rows.first, rows.size),
        (
            left - columns.low,
            right - columns.low,
            columns.high - columns.low,
            columns.full,
            columns.first,
            columns.size,
        ),
        flip,
        _columns_first(rows, columns),
        out.ctypes.data,
        _scratch(bottom - top, right - left, rows.size, columns.size),
    )


def _columns_first(rows: Axis, columns: Axis) -> bool:
    """Return whether Pillow filters along the columns first: where the height shrinks far more than the width.

    The order shows, by one grey level here and there, since the first pass rounds. Pillow before 13 always filters
    along the rows first (python-pillow/Pillow#9549); the rule of 13 holds here whatever version is installed.
    """
    fewer_rows = rows.high - rows.low - rows.full
    return fewer_rows > 0 and fewer_rows > 2 * (columns.high - columns.low - columns.full)


def _rgb_extent(name: str, array: NDArray[np.uint8]) -> tuple[int, int]:
    if array.ndim != 3 or array.shape[2] != 3 or array.dtype != np.uint8 or array.strides[1:] != (3, 1):
        raise UsageError(
            name, f"{array.dtype} {array.shape}, strides {array.strides}", "uint8 (h, w, 3), RGB side by side"
        )
    return array.shape[0], array.shape[1]


class _Scratch(threading.local):
    """The work memory of a thread. It grows to what the largest picture needed and is kept: fresh pages cost more."""

    def __init__(self) -> None:
        self.memory = np.empty(0, np.uint8)


_scratch_of_thread = _Scratch()


def _scratch(height: int, width: int, out_height: int, out_width: int) -> NDArray[np.uint8]:
    """Return work memory for `_resample`: rows moved apart, a block and its result, the result, what lies between."""
    width, rows, out_rows, stride = max(width, _LANES), _padded(height), _padded(out_height), _padded(out_width) * 3
    need = height * _PIXEL_BYTES + width * _PIXEL_BYTES + stride * _LANES + out_rows * stride
    need += max(rows * stride, out_height * width * 3)
    if _scratch_of_thread.memory.size < need:
        _scratch_of_thread.memory = np.empty(need + need // 4, np.uint8)
    return _scratch_of_thread.memory


def _padded(pixels: int) -> int:
    return (pixels + _LANES - 1) // _LANES * _LANES


@_intrinsic  # type: ignore[untyped-decorator]
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


@_intrinsic  # type: ignore[untyped-decorator]
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


@_intrinsic  # type: ignore[untyped-decorator]
def _copy(typing_context: Any, to: Any, source: Any, count: Any) -> Any:
    """Copy `count` bytes."""
    signature = types.void(types.intp, types.intp, types.intp)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        to, source, count = arguments
        pointer = ir.IntType(8).as_pointer()
        copy = builder.module.declare_intrinsic("llvm.memcpy", [pointer, pointer, ir.IntType(64)])
        flags = [ir.Constant(ir.IntType(1), 0)]
        builder.call(copy, [builder.inttoptr(to, pointer), builder.inttoptr(source, pointer), count, *flags])
        return context.get_dummy_value()

    return signature, generate


@njit(nogil=True, cache=True, inline="always")
def _address(array: Any) -> Any:
    """Return where an array lies, signed: numba adds uint64 and int64 as floats."""
    return np.intp(array.ctypes.data)


@njit(nogil=True, cache=True)
def _axis_weights(axis: Any) -> Any:
    """Return Pillow's filter of an axis: each output pixel's first source pixel, and its (size, taps) int32 weights.

    All rows of the table are as long as the longest, padded with zeros: a loop of one length is predicted. Source
    pixels count from the first that is read, and ``begins + taps`` never passes the last.
    """
    read_first, read_end, length, full, first, size = axis
    scale = length / full
    support = max(scale, 1.0)
    begins = np.empty(size, np.int64)
    counts = np.empty(size, np.int64)
    taps = 1
    for i in range(size):
        centre = (first + i + 0.5) * scale
        begins[i] = max(int(centre - support + 0.5), 0)
        counts[i] = min(int(centre + support + 0.5), length) - begins[i]
        taps = max(taps, counts[i])
    weights = np.zeros((size, taps), np.int32)
    shares = np.empty(taps, np.float64)
    inverse = 1.0 / support
    for i in range(size):
        centre = (first + i + 0.5) * scale
        total = 0.0
        for t in range(counts[i]):
            shares[t] = max(1.0 - abs((t + begins[i] - centre + 0.5) * inverse), 0.0)
            total += shares[t]
        shift = max(begins[i] + taps - read_end, 0)
        for t in range(counts[i]):
            weights[i, shift + t] = int(0.5 + shares[t] / total * (1 << _WEIGHT_BITS))
        begins[i] -= shift + read_first
    return begins, weights


@njit(nogil=True, cache=True)
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


@njit(nogil=True, cache=True)
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


@njit(nogil=True, cache=True)
def _resample(
    image: Any, image_stride: Any, rows: Any, columns: Any, flip: Any, columns_first: Any, out: Any, scratch: Any
) -> None:  # fmt: skip
    """Run both passes. `image` is the address of the first pixel that is read, `out` that of the slot.

    `rows` and `columns`: (first read, end of read, length, full, first, size), all counted from the axis's `low`.
    """
    height, width = rows[1] - rows[0], columns[1] - columns[0]
    out_height, out_width = rows[5], columns[5]
    row_begins, row_weights = _axis_weights(rows)
    column_begins, column_weights = _axis_weights(columns)
    result_stride = (out_width + _LANES - 1) // _LANES * _PIXEL_BYTES
    free = _address(scratch)

    if width < _LANES:  # no vector fits into a row: move the rows apart; what lies between has no weight
        for row in range(height):
            _copy(free + row * _PIXEL_BYTES, image + row * image_stride, width * 3)
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
            _copy(out + y * out_width * 3, result + y * result_stride, out_width * 3)
