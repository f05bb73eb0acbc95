"""The compiled half of `fastdata.resample`: the filter of an axis, and the two passes over the pixels.

Everything here works on addresses and on memory that the caller lends: arrays made in kernels, and NumPy's functions
on them, took numba more than a second to compile.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numpy.typing import NDArray

from fastdata._native import (
    Pointer,
    _intrinsic,
    compiled,
    copy_bytes,
    double_pointer,
    helper,
    integer,
    larger,
    long_pointer,
    signed_word_pointer,
    smaller,
    zero_bytes,
)

# ruff: noqa: ARG001  (numba fixes the parameters of an intrinsic and of its generator)

AXIS_FIELDS = 5
"""Of a plan's rows, then of its columns: the members of `fastdata.resample.Axis`."""
FLIP, REDUCTION, PLAN_FIELDS = 10, 11, 12

_WEIGHT_BITS = 32 - 8 - 2
"""Pillow's PRECISION_BITS: an 8-bit pixel times a weight, plus two bits of room in 32."""
_LANES = 16
"""Rows of a block, and bytes that a transposition moves at once."""
_PIXEL_BYTES = 3 * _LANES
"""One pixel of a transposed block: 16 rows of each channel; also the granule of a row in the second pass."""
_TABLES_BYTES = 2 * 8 * _LANES
"""Of the places of 16 rows: of the source, and of a block."""
_READ_FROM, _READ_COUNT, _FEWER, _TAPS, _BEGINS = range(5)
"""Of an axis that was worked out, in int64: the first pixel of the image that the filter reads and how many, the pixels
that the axis loses, the taps of its filter; then the first pixel of each sum, and the weights (int32) behind these."""


@_intrinsic
def _transpose(_typing: Any, to: Any, to_stride: Any, source: Any, offsets: Any) -> Any:
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


@_intrinsic
def _weighted_sum(_typing: Any, to: Any, source: Any, step: Any, weights: Any, taps: Any) -> Any:
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


@helper
def _work_out_axis(plan: Pointer, reduction: int, place: int, available: int, memory: int) -> int:
    """Write Pillow's filter of an axis to `memory`, as `_BEGINS` and its kind say.

    All rows of the weights are as long as the longest, padded with zeros: a loop of one length is predicted. Pixels
    count from the first that is read, and begins + taps never passes the last.

    Args:
        plan: The members of an `Axis`.
        reduction: Pixels of the picture that a decoder made into one.
        place: Where the image begins in the reduced picture.
        available: Pixels of the image.
        memory: Address.

    Returns:
        The address after what was written, or 0 where the image lacks pixels that the filter reads.
    """
    low, high, full, first, size = plan[0], plan[1], plan[2], plan[3], plan[4]
    origin = low // reduction
    length = (high + reduction - 1) // reduction - origin
    start = low / reduction - origin
    scale = (high - low) / reduction / full
    support = scale if scale > 1.0 else 1.0
    read_begin = larger(integer(start + (first + 0.5) * scale - support + 0.5), 0)
    read_end = smaller(integer(start + (first + size - 1 + 0.5) * scale + support + 0.5), length)
    read_from, axis = origin + read_begin - place, long_pointer(memory)
    if read_from < 0 or read_from + read_end - read_begin > available:
        return 0
    begins = long_pointer(memory + 8 * _BEGINS)
    taps = 1
    for i in range(size):
        centre = start + (first + i + 0.5) * scale
        begins[i] = larger(integer(centre - support + 0.5), 0)
        taps = larger(taps, smaller(integer(centre + support + 0.5), length) - begins[i])
    axis[_READ_FROM], axis[_READ_COUNT], axis[_FEWER], axis[_TAPS] = (
        read_from,
        read_end - read_begin,
        length - full,
        taps,
    )
    weights_at: int = memory + 8 * (_BEGINS + size)
    shares_at: int = weights_at + (4 * size * taps + 7) // 8 * 8
    weights, shares = signed_word_pointer(weights_at), double_pointer(shares_at)
    zero_bytes(weights_at, 4 * size * taps)
    inverse = 1.0 / support
    for i in range(size):
        centre = start + (first + i + 0.5) * scale
        count = smaller(integer(centre + support + 0.5), length) - begins[i]
        total = 0.0
        for t in range(count):
            distance = (t + begins[i] - centre + 0.5) * inverse
            share = 1.0 - distance if distance > 0.0 else 1.0 + distance
            shares[t] = share if share > 0.0 else 0.0
            total += shares[t]
        shift = larger(begins[i] + taps - read_end, 0)
        for t in range(count):
            weights[i * taps + shift + t] = integer(0.5 + shares[t] / total * (1 << _WEIGHT_BITS))
        begins[i] -= shift + read_begin
    return shares_at


@helper
def _filter_rows(
    source: int, source_stride: int, height: int, width: int, columns: int, size: int, flip: bool, to: int,
    to_stride: int, memory: int,
) -> None:  # fmt: skip
    """Filter along each row, 16 rows at a time. Writes `height` and `size` rounded up to 16; `width` >= 16.

    `columns` is the address of the worked out axis; `memory` that of two tables and a block before and after its pass.
    """
    begins, taps = long_pointer(columns + 8 * _BEGINS), long_pointer(columns)[_TAPS]
    weights = columns + 8 * (_BEGINS + size)
    source_offsets, result_offsets = long_pointer(memory), long_pointer(memory + 8 * _LANES)
    for lane in range(_LANES):
        result_offsets[lane] = lane * _LANES
    block = memory + _TABLES_BYTES
    block_result = block + width * _PIXEL_BYTES
    last = width * 3 - _LANES
    for row in range(0, height, _LANES):
        for lane in range(_LANES):
            source_offsets[lane] = smaller(row + lane, height - 1) * source_stride
        for begin in range(0, last + _LANES, _LANES):
            byte = smaller(begin, last)
            _transpose(block + byte * _LANES, _LANES, source + byte, memory)
        for x in range(size):
            place = size - 1 - x if flip else x
            _weighted_sum(
                block_result + place * _PIXEL_BYTES, block + begins[x] * _PIXEL_BYTES, _PIXEL_BYTES,
                weights + x * taps * 4, taps,
            )  # fmt: skip
        for byte in range(0, size * 3, _LANES):
            _transpose(to + row * to_stride + byte, to_stride, block_result + byte * _LANES, memory + 8 * _LANES)


@helper
def _filter_columns(
    source: int, source_stride: int, row_bytes: int, rows: int, size: int, to: int, to_stride: int
) -> None:
    """Filter along each column; `row_bytes` >= 48. `rows` is the address of the worked out axis."""
    begins, taps = long_pointer(rows + 8 * _BEGINS), long_pointer(rows)[_TAPS]
    weights = rows + 8 * (_BEGINS + size)
    last = row_bytes - _PIXEL_BYTES
    for y in range(size):
        for begin in range(0, last + _PIXEL_BYTES, _PIXEL_BYTES):
            byte = smaller(begin, last)
            _weighted_sum(
                to + y * to_stride + byte, source + begins[y] * source_stride + byte, source_stride,
                weights + y * taps * 4, taps,
            )  # fmt: skip


@compiled
def resample(
    image: NDArray[np.uint8],
    top: int,
    left: int,
    plans: NDArray[np.int64],
    row: int,
    out: NDArray[np.uint8],
    index: int,
    scratch: NDArray[np.uint8],
) -> int:
    """Resize and return 0; or do nothing and return the scratch bytes it takes, or -1 for arguments that do not fit."""
    plan_at = integer(plans.ctypes.data) + 8 * PLAN_FIELDS * row
    plan = long_pointer(plan_at)
    height, width, out_height, out_width = image.shape[0], image.shape[1], plan[4], plan[AXIS_FIELDS + 4]
    fits = out.shape[1] == out_height and out.shape[2] == out_width and image.shape[2] == 3 and out.shape[3] == 3
    if not fits or not 0 <= index < out.shape[0]:
        return -1
    result_stride = (out_width + _LANES - 1) // _LANES * _PIXEL_BYTES
    # Both axes (no filter has more taps than there are pixels), rows moved apart or a block, the result of a block, the
    # result, and what lies between the passes; rows and columns rounded up.
    need: int = (4 * out_height + 12 + _PIXEL_BYTES) * height + (4 * out_width + 12 + _PIXEL_BYTES) * (width + _LANES)
    need += (height + out_height + 3 * _LANES) * result_stride + out_height * (8 + 3 * width + _PIXEL_BYTES)
    need += 8 * out_width + 1024
    if scratch.size < need:
        return need
    rows = integer(scratch.ctypes.data)
    columns = _work_out_axis(plan, plan[REDUCTION], top, height, rows)
    free = integer(0)
    if columns:
        free = _work_out_axis(long_pointer(plan_at + 8 * AXIS_FIELDS), plan[REDUCTION], left, width, columns)
    if free == 0:
        return -1

    by_row, by_column = long_pointer(rows), long_pointer(columns)
    source, source_stride = integer(image.ctypes.data), width * 3
    source += by_row[_READ_FROM] * source_stride + by_column[_READ_FROM] * 3
    height, width = by_row[_READ_COUNT], by_column[_READ_COUNT]
    # Pillow 13 filters along the columns first where the height shrinks far more than the width; before, it never did
    # (python-pillow/Pillow#9549). It shows, by one grey level here and there, since the first pass rounds. The rule
    # of 13 holds here whatever version is installed.
    columns_first = by_row[_FEWER] > larger(0, 2 * by_column[_FEWER])

    if width < _LANES:  # no vector fits into a row: move the rows apart; what lies between has no weight
        for y in range(height):
            copy_bytes(free + y * _PIXEL_BYTES, source + y * source_stride, width * 3)
        source, source_stride, width = free, integer(_PIXEL_BYTES), integer(_LANES)
        free += height * _PIXEL_BYTES
    block = free
    free += _TABLES_BYTES + width * _PIXEL_BYTES + result_stride * _LANES
    target = integer(out.ctypes.data) + index * out_height * out_width * 3
    exact = out_width % _LANES == 0 and out_height % _LANES == 0
    result = target if exact else free
    free += 0 if exact else (out_height + _LANES - 1) // _LANES * _LANES * result_stride

    flip = plan[FLIP] != 0
    if columns_first:
        _filter_columns(source, source_stride, width * 3, rows, out_height, free, width * 3)
        _filter_rows(free, width * 3, out_height, width, columns, out_width, flip, result, result_stride, block)
    else:
        _filter_rows(source, source_stride, height, width, columns, out_width, flip, free, result_stride, block)
        _filter_columns(free, result_stride, result_stride, rows, out_height, result, result_stride)
    if not exact:
        for y in range(out_height):
            copy_bytes(target + y * out_width * 3, result + y * result_stride, out_width * 3)
    return 0
