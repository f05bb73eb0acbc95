"""The two Triton kernels of the resize on the GPU: Pillow's filter weights, and the weighted sums.

They do what `fastdata.resample` does on the CPU, with the same integers, for a whole batch at once: the pictures lie
anywhere on the device, and each is described by one row of numbers (`fastdata.backends._gpu_resize`). This module
imports Triton, so nothing may import it before a GPU is asked for.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Columns of a picture's row, and of each axis in it; `_gpu_resize.FIELDS` has the same order.
_ADDRESS = tl.constexpr(0)
_PLANE = tl.constexpr(1)
_FLIP = tl.constexpr(2)
_COLUMNS_FIRST = tl.constexpr(3)
_ROWS_AXIS = tl.constexpr(4)
_COLUMNS_AXIS = tl.constexpr(11)
_STRIDE = tl.constexpr(0)
_LENGTH = tl.constexpr(1)
_FULL = tl.constexpr(2)
_FIRST = tl.constexpr(3)
_READ_END = tl.constexpr(4)
_TAPS = tl.constexpr(5)
_TABLE = tl.constexpr(6)

_HALF = tl.constexpr(1 << 21)
_WEIGHT_BITS = tl.constexpr(22)
_WEIGHT_ONE = tl.constexpr(4194304.0)


@triton.jit
def weights_kernel(pictures, begins, weights, fields, height, width, block: tl.constexpr):
    """Fill in each output row's and column's first source pixel and its weights. Grid: (blocks of outputs, 2 axes, n).

    `weights` holds for each axis of each picture (taps, size) int32 from its table offset on; `begins` is
    (n, height + width) int32. Every table ends within the pixels that are read, as in `fastdata.resample`.
    """
    picture = tl.program_id(2)
    columns = tl.program_id(1)
    size = tl.where(columns == 0, height, width)
    axis = pictures + picture.to(tl.int64) * fields + tl.where(columns == 0, _ROWS_AXIS, _COLUMNS_AXIS)
    length = tl.load(axis + _LENGTH)
    read_end = tl.load(axis + _READ_END)
    taps = tl.load(axis + _TAPS).to(tl.int32)
    scale = length.to(tl.float64) / tl.load(axis + _FULL).to(tl.float64)
    support = tl.maximum(scale, 1.0)
    inverse = 1.0 / support

    output = tl.program_id(0) * block + tl.arange(0, block)
    wanted = output < size
    place = tl.minimum(output, size - 1)
    centre = ((tl.load(axis + _FIRST) + place).to(tl.float64) + 0.5) * scale
    # Truncation towards zero, as Pillow's; what is below zero becomes zero either way.
    begin = tl.maximum((centre - support + 0.5).to(tl.int64), 0)
    end = tl.minimum((centre + support + 0.5).to(tl.int64), length)
    start = tl.minimum(begin, read_end - taps)

    total = tl.full(
        [block], 0.0, tl.float64
    )  # not tl.zeros: a jitted function, which ties the interpreter to import order
    for tap in range(taps):
        source = start + tap
        share = tl.maximum(1.0 - tl.abs((source.to(tl.float64) - centre + 0.5) * inverse), 0.0)
        total += tl.where((source >= begin) & (source < end), share, 0.0)
    table = weights + tl.load(axis + _TABLE) + place
    for tap in range(taps):
        source = start + tap
        share = tl.maximum(1.0 - tl.abs((source.to(tl.float64) - centre + 0.5) * inverse), 0.0)
        share = tl.where((source >= begin) & (source < end), share, 0.0)
        weight = (0.5 + share / total * _WEIGHT_ONE).to(tl.int32)
        tl.store(table + tap * size, weight, mask=wanted)
    offset = picture.to(tl.int64) * (height + width) + tl.where(columns == 0, 0, height)
    tl.store(begins + offset + place, start.to(tl.int32), mask=wanted)


@triton.jit
def resize_kernel(
    pictures,
    begins,
    weights,
    out,
    fields,
    height,
    width,
    out_picture,
    out_row,
    out_column,
    out_channel,
    scale_0,
    scale_1,
    scale_2,
    shift_0,
    shift_1,
    shift_2,
    normalize: tl.constexpr,
    block: tl.constexpr,
):
    """Crop, resize, turn, mirror and (`normalize`) normalise. Grid: (blocks of output pixels, n).

    One pass over each output pixel's sources does what two passes with 8-bit pixels between them do: the inner sum is
    the first pass at one tap of the second, and is rounded to 8 bits. Which axis is the inner one is the picture's.
    """
    picture = tl.program_id(1).to(tl.int64)
    row = pictures + picture * fields
    base = tl.load(row + _ADDRESS).to(tl.pointer_type(tl.uint8))
    plane = tl.load(row + _PLANE)
    columns_first = tl.load(row + _COLUMNS_FIRST) != 0
    y_stride, x_stride = tl.load(row + _ROWS_AXIS + _STRIDE), tl.load(row + _COLUMNS_AXIS + _STRIDE)
    y_taps = tl.load(row + _ROWS_AXIS + _TAPS).to(tl.int32)
    x_taps = tl.load(row + _COLUMNS_AXIS + _TAPS).to(tl.int32)

    pixel = tl.program_id(0) * block + tl.arange(0, block)
    wanted = pixel < height * width
    y = tl.where(wanted, pixel // width, 0)
    x = tl.where(wanted, pixel % width, 0)
    first = begins + picture * (height + width)
    y_begin, x_begin = tl.load(first + y).to(tl.int64), tl.load(first + height + x).to(tl.int64)
    y_table = weights + tl.load(row + _ROWS_AXIS + _TABLE) + y
    x_table = weights + tl.load(row + _COLUMNS_AXIS + _TABLE) + x

    outer_taps = tl.where(columns_first, x_taps, y_taps)
    inner_taps = tl.where(columns_first, y_taps, x_taps)
    outer_stride = tl.where(columns_first, x_stride, y_stride)
    inner_stride = tl.where(columns_first, y_stride, x_stride)
    outer_size = tl.where(columns_first, width, height)
    inner_size = tl.where(columns_first, height, width)
    outer_table = tl.where(columns_first, x_table, y_table)
    inner_table = tl.where(columns_first, y_table, x_table)

    start = base + y_begin * y_stride + x_begin * x_stride
    red = tl.full([block], _HALF, tl.int32)
    green = tl.full([block], _HALF, tl.int32)
    blue = tl.full([block], _HALF, tl.int32)
    for outer in range(outer_taps):
        source = start + outer * outer_stride
        inner_red = tl.full([block], _HALF, tl.int32)
        inner_green = tl.full([block], _HALF, tl.int32)
        inner_blue = tl.full([block], _HALF, tl.int32)
        for inner in range(inner_taps):
            weight = tl.load(inner_table + inner * inner_size)
            at = source + inner * inner_stride
            inner_red += weight * tl.load(at).to(tl.int32)
            inner_green += weight * tl.load(at + plane).to(tl.int32)
            inner_blue += weight * tl.load(at + 2 * plane).to(tl.int32)
        weight = tl.load(outer_table + outer * outer_size)
        red += weight * (inner_red >> _WEIGHT_BITS)
        green += weight * (inner_green >> _WEIGHT_BITS)
        blue += weight * (inner_blue >> _WEIGHT_BITS)
    red, green, blue = red >> _WEIGHT_BITS, green >> _WEIGHT_BITS, blue >> _WEIGHT_BITS

    x = tl.where(tl.load(row + _FLIP) != 0, width - 1 - x, x)
    target = out + picture * out_picture + y.to(tl.int64) * out_row + x.to(tl.int64) * out_column
    if normalize:
        tl.store(target, red.to(tl.float32) * scale_0 + shift_0, mask=wanted)
        tl.store(target + out_channel, green.to(tl.float32) * scale_1 + shift_1, mask=wanted)
        tl.store(target + 2 * out_channel, blue.to(tl.float32) * scale_2 + shift_2, mask=wanted)
    else:
        tl.store(target, red, mask=wanted)
        tl.store(target + out_channel, green, mask=wanted)
        tl.store(target + 2 * out_channel, blue, mask=wanted)
