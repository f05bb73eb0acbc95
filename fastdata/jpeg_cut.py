"""Crop before decode: cutting a crop-ready JPEG to the part that holds a window, by copying bytes.

A crop-ready file (`fastdata.transcode`) has restart markers at fixed places of every MCU row and a table of the lengths
between them. A cut is its header with another size, the segments of the wanted rows and columns, and the restart
markers counted anew: an ordinary JPEG. It is wide enough that its pixels inside the window equal those of the full
decode. Windows are in stored coordinates, before the Exif orientation is applied (`fastdata.decode.stored_window`).

Every other file is handed on whole. So is one whose table does not fit: the lengths must add up to the end marker, and
restart markers must lie where the table says around all that is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fastdata._native import (
    Buffer,
    Pointer,
    byte_pointer,
    compiled,
    copy_bytes,
    helper,
    integer,
    larger,
    locate,
    long_pointer,
    smaller,
    zero_bytes,
)
from fastdata.jpeg import (
    _COMPONENTS,
    _END_OFFSET,
    _HEIGHT,
    _MCU_HEIGHT,
    _MCU_WIDTH,
    _PROCESS,
    _REFUSAL,
    _RESTART_INTERVAL,
    _SCAN_COMPONENTS,
    _SCAN_OFFSET,
    _SOF_OFFSET,
    _TABLE_END,
    _TABLE_OFFSET,
    _WIDTH,
    HEADER_FIELDS,
    _read_headers,
    read_headers_at,
)
from fastdata.jpeg_segments import next_row, parts_fit

OUTCOMES: Final = ("cut", "not crop-ready", "segment table does not fit")
"""What became of a file, by code: only the first is a cut, the others are whole."""
CUT, NOT_READY, BAD_TABLE = range(len(OUTCOMES))

_NAMES: Final = ("outcome", "top", "left", "height", "width", "bytes")
CUT_DTYPE: Final = np.dtype([(name, np.int64) for name in _NAMES])
"""Of one cut: index into `OUTCOMES`; its place in the full picture and its size, in stored pixels; and in bytes."""
CUT_FIELDS: Final = len(_NAMES)
_FIRST_FACTORS: Final = 11
"""Bytes from a frame header's marker to the sampling factors of its first component."""
_ONE_BY_ONE: Final = 0x11
"""Sampling factors, horizontal and vertical, as a frame header holds them."""
_ROW_SEGMENTS: Final = 65_536 // 8
"""Of the widest JPEG, at most: segments are whole MCUs."""
_OUTCOME, _TOP, _LEFT, _CUT_HEIGHT, _CUT_WIDTH, _BYTES = range(CUT_FIELDS)


def locate_files(buffers: Sequence[Buffer]) -> Files:
    """Find out where files lie in memory and read their headers."""
    addresses, lengths = locate(buffers)
    return Files(tuple(buffers), addresses, lengths, read_headers_at(addresses, lengths))


def plan_cuts(files: Files, windows: NDArray[np.int64]) -> NDArray[np.void]:
    """Work out the cut of each file, without the GIL.

    Args:
        files: n files.
        windows: (n, 4) top, left, height, width in stored pixels; what lies outside of a picture is left out.

    Returns:
        (n,) structured array of `CUT_DTYPE`.
    """
    plans = np.empty((len(files.addresses), CUT_FIELDS), np.int64)
    windows = np.ascontiguousarray(windows, np.int64)
    _plan_all(
        files.addresses,
        files.lengths,
        _matrix(files.headers),
        np.ascontiguousarray(windows, np.int64),
        plans,
        _row_ends(),
    )
    return plans.view(CUT_DTYPE).reshape(len(plans))


def write_cuts(
    files: Files, plans: NDArray[np.void], out: NDArray[np.uint8], starts: NDArray[np.int64], padded_bytes: int = 0
) -> None:
    """Write all cuts into one buffer, without the GIL.

    Args:
        files: n files.
        plans: (n,) from `plan_cuts`, for the same files.
        out: (bytes,) receives the cuts.
        starts: (n,) where in `out` each cut begins; ascending, with room for ``plans["bytes"]`` each.
        padded_bytes: Where above 0, each cut is followed by zeros up to this many bytes.

    Raises:
        ValueError: The cuts would overlap or leave `out`.
    """
    if out.ndim != 1 or not out.flags.c_contiguous or not out.flags.writeable:
        raise ValueError("out: a writable, contiguous array of one dimension is needed")
    ends = np.append(starts[1:], out.size)[: len(starts)]
    if (starts < 0).any() or (starts + np.maximum(plans["bytes"], padded_bytes) > ends).any():
        raise ValueError("starts: cuts overlap or leave `out`")
    _write_all(
        files.addresses, files.lengths, _matrix(files.headers), _matrix(plans), out, starts, padded_bytes, _row_ends()
    )


def unsample_gray(files: Files, plans: NDArray[np.void], out: NDArray[np.uint8], starts: NDArray[np.int64]) -> None:
    """Set the sampling factors of gray JPEGs to 1 x 1, where their headers say something else.

    They mean nothing: a scan of one component is not interleaved, whatever its factors (ITU-T T.81, A.2.2). Encoders
    that are asked for chroma subsampling write them into gray files too; Pillow does. nvJPEG goes by them nonetheless,
    and returns wrong pixels without an error: on an H200 57 to 69 grey levels off in the mean, the same ones each time
    of whole files, other ones each time of files with restart markers.

    Args:
        files: n files.
        plans: (n,) from `plan_cuts`.
        out: (bytes,) what `write_cuts` has written; changed.
        starts: (n,) where in `out` each file begins.
    """
    headers = files.headers
    odd = np.flatnonzero((headers["components"] == 1) & (headers["sampling"] != _ONE_BY_ONE))
    if not len(odd):
        return
    headers, plans = headers[odd], plans[odd]
    # A cut leaves the segment table out.
    without_table = (plans["outcome"] == CUT) & (headers["sof_offset"] > headers["table_offset"])
    table_bytes = np.where(without_table, headers["table_end"] - headers["table_offset"], 0)
    out[starts[odd] + headers["sof_offset"] - table_bytes + _FIRST_FACTORS] = _ONE_BY_ONE


def cut_all(
    files: Files, windows: NDArray[np.int64], out: NDArray[np.uint8] | None = None
) -> tuple[list[Buffer], NDArray[np.void]]:
    """Cut files, each planned and written while the processor's cache holds it, without the GIL.

    Args:
        files: n files.
        windows: As for `plan_cuts`.
        out: (bytes,) at least as long as all files together, to be written to; None allocates. Fresh memory costs about
            as much as the cuts themselves, so threads that cut again and again keep theirs.

    Returns:
        n files: views of `out`, one after the other, or the buffer itself where a file stays whole; and (n,) structured
        array of `CUT_DTYPE`.

    Raises:
        ValueError: `out` is too small.
    """
    needed = int(files.lengths.sum())  # a cut is never longer than its file
    if out is None:
        out = np.empty(needed, np.uint8)
    elif len(out) < needed:
        raise ValueError(f"out: {len(out)} bytes, at least {needed} are needed")
    plans = np.empty((len(files.addresses), CUT_FIELDS), np.int64)
    windows = np.ascontiguousarray(windows, np.int64)
    _cut_all(files.addresses, files.lengths, _matrix(files.headers), windows, plans, out, _row_ends())
    view, pieces, end = out.data, list(files.buffers), 0
    for i in np.flatnonzero(plans[:, _OUTCOME] == CUT).tolist():
        start, end = end, end + int(plans[i, _BYTES])
        pieces[i] = view[start:end]
    return pieces, plans.view(CUT_DTYPE).reshape(len(plans))


def cut(data: Buffer, window: tuple[int, int, int, int], out: NDArray[np.uint8] | None = None) -> tuple[Buffer, Cut]:
    """Cut one file, without the GIL.

    Args:
        data: The file.
        window: top, left, height, width in stored pixels.
        out: (bytes,) at least as long as `data`, to be written to; None allocates.

    Returns:
        The smaller file (a view of `out`), or `data` itself where it has to stay whole; and where the cut lies.
    """
    if out is None:
        out = np.empty(len(data), np.uint8)
    elif len(out) < len(data):
        raise ValueError(f"out: {len(out)} bytes, at least {len(data)} are needed")
    addresses, lengths = locate((data,))
    headers, plans = np.zeros((1, HEADER_FIELDS), np.int64), np.empty((1, CUT_FIELDS), np.int64)
    _read_headers(addresses, lengths, headers)
    _cut_all(addresses, lengths, headers, np.array((window,), np.int64), plans, out, _row_ends())
    where = Cut(*plans.tolist()[0])
    return (out.data[: where.bytes] if where.outcome == CUT else data), where


@dataclass(frozen=True, slots=True)
class Files:
    """Encoded files in memory: where they lie and what their headers say."""

    buffers: tuple[Any, ...]
    """What keeps the memory alive."""
    addresses: NDArray[np.int64]
    """(n,)."""
    lengths: NDArray[np.int64]
    """(n,) bytes."""
    headers: NDArray[np.void]
    """(n,) structured array of `fastdata.jpeg.HEADER_DTYPE`."""

    def take(self, which: NDArray[np.int64]) -> Files:
        """Return some of the files, by index."""
        buffers = tuple(self.buffers[i] for i in which.tolist())
        return Files(buffers, self.addresses[which], self.lengths[which], self.headers[which])


@dataclass(frozen=True, slots=True)
class Cut:
    """Where a cut lies in the full picture, in stored pixels."""

    outcome: int
    """Index into `OUTCOMES`."""
    top: int
    left: int
    height: int
    width: int
    bytes: int
    """Size of the cut file."""


def _row_ends() -> NDArray[np.int64]:
    """Return memory for the ends of a row's segments, a 0 before them.

    A kernel that made it would take longer to compile.
    """
    ends = np.empty(1 + _ROW_SEGMENTS, np.int64)
    ends[0] = 0
    return ends


def _matrix(records: NDArray[np.void]) -> NDArray[np.int64]:
    """Return records of int64 fields as the (n, fields) matrix that kernels take."""
    return records.view(np.int64).reshape(len(records), len(records.dtype.names or ()))


@helper
def _cut_bytes(
    source: Pointer, header: Pointer, across: int, down: int, first: int, end: int, first_row: int, end_row: int,
    ends: Pointer,
) -> int:  # fmt: skip
    """Return the bytes of a cut, -1 where the segment table does not fit the file.

    Args:
        source: The file.
        header: Its header.
        across: Segments of a row of the picture.
        down: Rows of the picture.
        first: First segment of each row that is copied.
        end: Segment after the last of them.
        first_row: First row that is copied.
        end_row: Row after the last of them.
        ends: Memory for the ends of a row's segments, preceded by a 0.
    """
    at, part_end, table_end = header[_TABLE_OFFSET], header[_TABLE_OFFSET], header[_TABLE_END]
    start, last = header[_SCAN_OFFSET], header[_END_OFFSET] + 2
    total = start - (table_end - at)
    for row in range(down):
        count = end if first_row <= row < end_row else 0
        at, part_end, size = next_row(source, at, part_end, table_end, across, count, ends)
        if size < 0 or start + size > last:
            return -1
        if count:
            for column in range(first - 1, end):  # the markers around the segments that are copied
                number = row * across + column  # of the restart marker behind the segment, over the whole scan
                place = start + ends[column] - 2
                missing = source[place] != 0xFF or source[place + 1] != 0xD0 + (number & 7)
                if 0 <= number < across * down - 1 and missing:
                    return -1
            total += ends[end - 1] - ends[first - 1]
        start += size
    return total if at == table_end and start == last else -1


@helper
def _plan(source: Pointer, length: int, header: Pointer, window: Pointer, plan: Pointer, ends: Pointer) -> None:
    """Fill in one plan; `ends` as for `_cut_bytes`."""
    picture_height, picture_width = header[_HEIGHT], header[_WIDTH]
    plan[_OUTCOME], plan[_TOP], plan[_LEFT] = NOT_READY, 0, 0
    plan[_CUT_HEIGHT], plan[_CUT_WIDTH], plan[_BYTES] = picture_height, picture_width, length
    top, bottom = larger(window[0], 0), smaller(window[0] + window[2], picture_height)
    left, right = larger(window[1], 0), smaller(window[1] + window[3], picture_width)
    if header[_REFUSAL] or header[_TABLE_OFFSET] == 0 or bottom <= top or right <= left:
        return
    plan[_OUTCOME] = BAD_TABLE
    mcu_height, mcu_width, interval = header[_MCU_HEIGHT], header[_MCU_WIDTH], header[_RESTART_INTERVAL]
    down, across = (picture_height + mcu_height - 1) // mcu_height, (picture_width + mcu_width - 1) // mcu_width
    sequential = header[_PROCESS] < 2 and header[_SCAN_COMPONENTS] == header[_COMPONENTS]
    if not sequential or interval == 0 or across % interval:
        return
    if not parts_fit(source, header[_TABLE_OFFSET], header[_TABLE_END]):
        return
    # Upsampling of chroma reads the next sample, so one more pixel is needed; without subsampling, none.
    more_rows, more_columns = integer(mcu_height > 8), integer(mcu_width > 8)
    first_row = larger(top - more_rows, 0) // mcu_height
    end_row = smaller((bottom + more_rows + mcu_height - 1) // mcu_height, down)
    first = larger(left - more_columns, 0) // mcu_width
    end = smaller((right + more_columns + mcu_width - 1) // mcu_width, across)
    if more_columns and end == across:
        first = larger(0, smaller(first, across - 2))  # libjpeg upsamples plainly where chroma is two samples wide
    first, end, step = first // interval, (end + interval - 1) // interval, interval * mcu_width
    size = _cut_bytes(source, header, across // interval, down, first, end, first_row, end_row, ends)
    if size >= 0:
        plan[_OUTCOME], plan[_BYTES] = CUT, size
        plan[_TOP], plan[_LEFT] = first_row * mcu_height, first * step
        plan[_CUT_HEIGHT] = smaller(end_row * mcu_height, picture_height) - plan[_TOP]
        plan[_CUT_WIDTH] = smaller(end * step, picture_width) - plan[_LEFT]


@helper
def _write_head(address: int, header: Pointer, plan: Pointer, target: int) -> int:
    """Write a cut's header, the file's without its segment table and with the size of the cut; return its bytes."""
    table, table_end = header[_TABLE_OFFSET], header[_TABLE_END]
    copy_bytes(target, address, table)
    copy_bytes(target + table, address + table_end, header[_SCAN_OFFSET] - table_end)
    size_at = header[_SOF_OFFSET] + 5
    if size_at > table:
        size_at -= table_end - table
    out = byte_pointer(target)
    out[size_at], out[size_at + 1] = plan[_CUT_HEIGHT] >> 8, plan[_CUT_HEIGHT] & 255
    out[size_at + 2], out[size_at + 3] = plan[_CUT_WIDTH] >> 8, plan[_CUT_WIDTH] & 255
    return header[_SCAN_OFFSET] - (table_end - table)  # type: ignore[no-any-return]


@helper
def _write(address: int, header: Pointer, plan: Pointer, target: int, ends: Pointer) -> None:
    """Write one cut to `target`: each row is copied in one piece, then its restart markers are counted anew."""
    mcu_height, step = header[_MCU_HEIGHT], header[_MCU_WIDTH] * header[_RESTART_INTERVAL]
    across = (header[_WIDTH] + step - 1) // step
    first, end = plan[_LEFT] // step, (plan[_LEFT] + plan[_CUT_WIDTH] + step - 1) // step
    first_row, end_row = plan[_TOP] // mcu_height, (plan[_TOP] + plan[_CUT_HEIGHT] + mcu_height - 1) // mcu_height
    at, part_end, table_end = header[_TABLE_OFFSET], header[_TABLE_OFFSET], header[_TABLE_END]
    source, out = byte_pointer(address), byte_pointer(target)
    start, number = header[_SCAN_OFFSET], 0
    to = _write_head(address, header, plan, target)
    for row in range(end_row):
        count = end if row >= first_row else 0
        at, part_end, size = next_row(source, at, part_end, table_end, across, count, ends)
        if count:
            skipped = ends[first - 1]
            copied = ends[end - 1] - skipped
            if to + copied > plan[_BYTES]:
                return  # the file has changed under us since it was planned
            copy_bytes(target + to, address + start + skipped, copied)
            for column in range(first, end):
                mark = to + ends[column] - skipped - 2
                out[mark] = 0xFF
                out[mark + 1] = 0xD0 + (number & 7)
                number += 1
            to += copied
        start += size
    out[to - 2] = 0xFF
    out[to - 1] = 0xD9


@compiled
def _plan_all(
    addresses: NDArray[np.int64],
    lengths: NDArray[np.int64],
    headers: NDArray[np.int64],
    windows: NDArray[np.int64],
    plans: NDArray[np.int64],
    ends: NDArray[np.int64],
) -> None:
    row_ends = long_pointer(integer(ends.ctypes.data) + 8)
    for i in range(len(addresses)):
        header = long_pointer(integer(headers.ctypes.data) + 8 * HEADER_FIELDS * i)
        plan = long_pointer(integer(plans.ctypes.data) + 8 * CUT_FIELDS * i)
        window = long_pointer(integer(windows.ctypes.data) + 8 * 4 * i)
        _plan(byte_pointer(addresses[i]), lengths[i], header, window, plan, row_ends)


@compiled
def _cut_all(
    addresses: NDArray[np.int64],
    lengths: NDArray[np.int64],
    headers: NDArray[np.int64],
    windows: NDArray[np.int64],
    plans: NDArray[np.int64],
    out: NDArray[np.uint8],
    ends: NDArray[np.int64],
) -> None:
    target, row_ends = integer(out.ctypes.data), long_pointer(integer(ends.ctypes.data) + 8)
    for i in range(len(addresses)):
        header = long_pointer(integer(headers.ctypes.data) + 8 * HEADER_FIELDS * i)
        plan = long_pointer(integer(plans.ctypes.data) + 8 * CUT_FIELDS * i)
        window = long_pointer(integer(windows.ctypes.data) + 8 * 4 * i)
        _plan(byte_pointer(addresses[i]), lengths[i], header, window, plan, row_ends)
        if plan[_OUTCOME] == CUT:
            _write(addresses[i], header, plan, target, row_ends)
            target += plan[_BYTES]


@compiled
def _write_all(
    addresses: NDArray[np.int64],
    lengths: NDArray[np.int64],
    headers: NDArray[np.int64],
    plans: NDArray[np.int64],
    out: NDArray[np.uint8],
    starts: NDArray[np.int64],
    padded_bytes: int,
    ends: NDArray[np.int64],
) -> None:
    row_ends = long_pointer(integer(ends.ctypes.data) + 8)
    for i in range(len(addresses)):
        header = long_pointer(integer(headers.ctypes.data) + 8 * HEADER_FIELDS * i)
        plan = long_pointer(integer(plans.ctypes.data) + 8 * CUT_FIELDS * i)
        target = integer(out.ctypes.data) + starts[i]
        if plan[_OUTCOME] == CUT:
            _write(addresses[i], header, plan, target, row_ends)
        else:
            copy_bytes(target, addresses[i], lengths[i])
        if padded_bytes > plan[_BYTES]:
            zero_bytes(target + plan[_BYTES], padded_bytes - plan[_BYTES])
