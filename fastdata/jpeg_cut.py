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

from fastdata import jpeg
from fastdata._native import (
    Buffer,
    Pointer,
    byte_pointer,
    compiled,
    copy_bytes,
    helper,
    inlined,
    integer,
    locate,
    long_pointer,
    zero_bytes,
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
_OUTCOME, _TOP, _LEFT, _CUT_HEIGHT, _CUT_WIDTH, _BYTES = range(CUT_FIELDS)


def locate_files(buffers: Sequence[Buffer]) -> Files:
    """Find out where files lie in memory and read their headers."""
    addresses, lengths = locate(buffers)
    return Files(tuple(buffers), addresses, lengths, jpeg.read_headers_at(addresses, lengths))


def plan_cuts(files: Files, windows: NDArray[np.int64]) -> NDArray[np.void]:
    """Work out the cut of each file, without the GIL.

    Args:
        files: n files.
        windows: (n, 4) top, left, height, width in stored pixels; what lies outside of a picture is left out.

    Returns:
        (n,) structured array of `CUT_DTYPE`.
    """
    plans = np.empty((len(files.addresses), CUT_FIELDS), np.int64)
    _plan_all(files.addresses, files.lengths, _matrix(files.headers), np.ascontiguousarray(windows, np.int64), plans)
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
    _write_all(files.addresses, files.lengths, _matrix(files.headers), _matrix(plans), out, starts, padded_bytes)


def cut_padded(files: Files, windows: NDArray[np.int64]) -> tuple[NDArray[np.uint8], NDArray[np.void]]:
    """Cut files into one array padded with zeros, which decoders read over; files that stay whole are copied.

    Returns:
        (n, longest) uint8, and (n,) structured array of `CUT_DTYPE`.
    """
    plans = plan_cuts(files, windows)
    longest = int(plans["bytes"].max(initial=0))
    out = np.zeros((len(plans), longest), np.uint8)  # the system's zero pages: padding costs nothing until it is read
    write_cuts(files, plans, out.reshape(-1), np.arange(len(plans)) * longest)
    return out, plans


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
    _cut_all(files.addresses, files.lengths, _matrix(files.headers), windows, plans, out)
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
    rows = np.empty(jpeg.HEADER_FIELDS + CUT_FIELDS, np.int64)
    _cut_one(np.frombuffer(data, np.uint8), *window, rows, out)
    where = Cut(*rows[jpeg.HEADER_FIELDS :].tolist())
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


def _matrix(records: NDArray[np.void]) -> NDArray[np.int64]:
    """Return records of int64 fields as the (n, fields) matrix that kernels take."""
    return records.view(np.int64).reshape(len(records), len(records.dtype.names or ()))


@inlined
def _span(first: int, count: int, margin: int, step: int, steps: int) -> tuple[int, int]:
    """Return the steps (MCUs) that hold ``count`` pixels from `first` on and `margin` pixels around them."""
    return max(first - margin, 0) // step, min((first + count + margin + step - 1) // step, steps)


@helper
def _place(header: Pointer, top: int, left: int, height: int, width: int, plan: Pointer) -> None:
    """Fill in the place and size of the cut for a window inside the picture."""
    mcu_width, mcu_height = header[jpeg._MCU_WIDTH], header[jpeg._MCU_HEIGHT]
    across = (header[jpeg._WIDTH] + mcu_width - 1) // mcu_width
    down = (header[jpeg._HEIGHT] + mcu_height - 1) // mcu_height
    # Upsampling of chroma reads the next sample, so one more pixel is needed; without subsampling, none.
    first_row, end_row = _span(top, height, 1 if mcu_height > 8 else 0, mcu_height, down)
    first, end = _span(left, width, 1 if mcu_width > 8 else 0, mcu_width, across)
    if mcu_width > 8 and end == across:
        first = max(0, min(first, across - 2))  # libjpeg upsamples plainly where chroma is at most two samples wide
    interval = header[jpeg._RESTART_INTERVAL]
    first, end = first // interval * interval, (end + interval - 1) // interval * interval
    plan[_TOP], plan[_LEFT] = first_row * mcu_height, first * mcu_width
    plan[_CUT_HEIGHT] = min(end_row * mcu_height, header[jpeg._HEIGHT]) - plan[_TOP]
    plan[_CUT_WIDTH] = min(end * mcu_width, header[jpeg._WIDTH]) - plan[_LEFT]


@inlined
def _segments(header: Pointer, plan: Pointer) -> tuple[int, int, int, int, int, int]:
    """Return the picture's segments across and down, then the cut's: first, end, first row, end row."""
    mcu_height, step = header[jpeg._MCU_HEIGHT], header[jpeg._MCU_WIDTH] * header[jpeg._RESTART_INTERVAL]
    return (
        (header[jpeg._WIDTH] + step - 1) // step,
        (header[jpeg._HEIGHT] + mcu_height - 1) // mcu_height,
        plan[_LEFT] // step,
        (plan[_LEFT] + plan[_CUT_WIDTH] + step - 1) // step,
        plan[_TOP] // mcu_height,
        (plan[_TOP] + plan[_CUT_HEIGHT] + mcu_height - 1) // mcu_height,
    )


@inlined
def _head_bytes(header: Pointer) -> int:
    """Return the bytes of a cut before its entropy-coded data: all but the segment table."""
    bytes_: int = header[jpeg._SCAN_OFFSET] - (header[jpeg._TABLE_END] - header[jpeg._TABLE_OFFSET])
    return bytes_


@inlined
def _is_marker(source: Pointer, at: int, number: int) -> bool:
    """Whether restart marker `number` (from 0 over the whole scan) lies at `at`."""
    return bool(source[at] == 0xFF and source[at + 1] == 0xD0 + (number & 7))


@helper
def _cut_bytes(source: Pointer, header: Pointer, plan: Pointer) -> int:
    """Return the bytes of the cut at `plan`, -1 where the segment table does not fit the file."""
    across, down, first, end, first_row, end_row = _segments(header, plan)
    at, part_end, table_end = header[jpeg._TABLE_OFFSET], header[jpeg._TABLE_OFFSET], header[jpeg._TABLE_END]
    start, last = header[jpeg._SCAN_OFFSET], header[jpeg._END_OFFSET] + 2
    total, ends = _head_bytes(header), np.empty(end, np.int64)
    for row in range(down):
        wanted = first_row <= row < end_row
        at, part_end, size = next_row(source, at, part_end, table_end, across, end if wanted else 0, ends)
        if size < 0 or start + size > last:
            return -1
        if wanted:
            for column in range(first - 1, end):  # the markers around the segments that are copied
                number = row * across + column
                place = start + (ends[column] if column >= 0 else 0) - 2
                if 0 <= number < across * down - 1 and not _is_marker(source, place, number):
                    return -1
            total += ends[end - 1] - (ends[first - 1] if first else 0)
        start += size
    return total if at == table_end and start == last else -1


@helper
def _plan(
    source: Pointer, header: Pointer, top: int, left: int, height: int, width: int, length: int, plan: Pointer
) -> None:
    """Fill in one plan."""
    bottom, right = min(top + height, header[jpeg._HEIGHT]), min(left + width, header[jpeg._WIDTH])
    top, left = max(top, 0), max(left, 0)
    plan[_TOP], plan[_LEFT], plan[_BYTES], plan[_OUTCOME] = 0, 0, length, NOT_READY
    plan[_CUT_HEIGHT], plan[_CUT_WIDTH] = header[jpeg._HEIGHT], header[jpeg._WIDTH]
    interval = header[jpeg._RESTART_INTERVAL]
    sequential = header[jpeg._PROCESS] < 2 and header[jpeg._SCAN_COMPONENTS] == header[jpeg._COMPONENTS]
    if header[jpeg._REFUSAL] or header[jpeg._TABLE_OFFSET] == 0 or bottom <= top or right <= left:
        return
    plan[_OUTCOME] = BAD_TABLE
    across = (header[jpeg._WIDTH] + header[jpeg._MCU_WIDTH] - 1) // header[jpeg._MCU_WIDTH]
    if not sequential or interval == 0 or across % interval:
        return
    if not parts_fit(source, header[jpeg._TABLE_OFFSET], header[jpeg._TABLE_END]):
        return
    _place(header, top, left, bottom - top, right - left, plan)
    size = _cut_bytes(source, header, plan)
    if size < 0:
        plan[_TOP], plan[_LEFT] = 0, 0
        plan[_CUT_HEIGHT], plan[_CUT_WIDTH] = header[jpeg._HEIGHT], header[jpeg._WIDTH]
    else:
        plan[_OUTCOME], plan[_BYTES] = CUT, size


@helper
def _write_head(address: int, header: Pointer, plan: Pointer, target: int) -> None:
    """Write a cut's header: the file's without its segment table, with the size of the cut."""
    table, table_end = header[jpeg._TABLE_OFFSET], header[jpeg._TABLE_END]
    copy_bytes(target, address, table)
    copy_bytes(target + table, address + table_end, header[jpeg._SCAN_OFFSET] - table_end)
    size_at = header[jpeg._SOF_OFFSET] + 5
    if size_at > table:
        size_at -= table_end - table
    out = byte_pointer(target)
    out[size_at], out[size_at + 1] = plan[_CUT_HEIGHT] >> 8, plan[_CUT_HEIGHT] & 255
    out[size_at + 2], out[size_at + 3] = plan[_CUT_WIDTH] >> 8, plan[_CUT_WIDTH] & 255


@helper
def _write(address: int, header: Pointer, plan: Pointer, target: int) -> None:
    """Write one cut to `target`: each row is copied in one piece, then its restart markers are counted anew."""
    _write_head(address, header, plan, target)
    across, _, first, end, first_row, end_row = _segments(header, plan)
    at, part_end, table_end = header[jpeg._TABLE_OFFSET], header[jpeg._TABLE_OFFSET], header[jpeg._TABLE_END]
    ends, source, out = np.empty(end, np.int64), byte_pointer(address), byte_pointer(target)
    start, to, number = header[jpeg._SCAN_OFFSET], _head_bytes(header), 0
    for row in range(end_row):
        count = end if row >= first_row else 0
        at, part_end, size = next_row(source, at, part_end, table_end, across, count, ends)
        if count:
            skipped = ends[first - 1] if first else 0
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
) -> None:
    for i in range(len(addresses)):
        header = long_pointer(integer(headers.ctypes.data) + 8 * jpeg.HEADER_FIELDS * i)
        plan = long_pointer(integer(plans.ctypes.data) + 8 * CUT_FIELDS * i)
        top, left, height, width = windows[i, 0], windows[i, 1], windows[i, 2], windows[i, 3]
        _plan(byte_pointer(addresses[i]), header, top, left, height, width, lengths[i], plan)


@compiled
def _cut_all(
    addresses: NDArray[np.int64],
    lengths: NDArray[np.int64],
    headers: NDArray[np.int64],
    windows: NDArray[np.int64],
    plans: NDArray[np.int64],
    out: NDArray[np.uint8],
) -> None:
    target = integer(out.ctypes.data)
    for i in range(len(addresses)):
        header = long_pointer(integer(headers.ctypes.data) + 8 * jpeg.HEADER_FIELDS * i)
        plan = long_pointer(integer(plans.ctypes.data) + 8 * CUT_FIELDS * i)
        top, left, height, width = windows[i, 0], windows[i, 1], windows[i, 2], windows[i, 3]
        _plan(byte_pointer(addresses[i]), header, top, left, height, width, lengths[i], plan)
        if plan[_OUTCOME] == CUT:
            _write(addresses[i], header, plan, target)
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
) -> None:
    for i in range(len(addresses)):
        header = long_pointer(integer(headers.ctypes.data) + 8 * jpeg.HEADER_FIELDS * i)
        plan = long_pointer(integer(plans.ctypes.data) + 8 * CUT_FIELDS * i)
        target = integer(out.ctypes.data) + starts[i]
        if plan[_OUTCOME] == CUT:
            _write(addresses[i], header, plan, target)
        else:
            copy_bytes(target, addresses[i], lengths[i])
        if padded_bytes > plan[_BYTES]:
            zero_bytes(target + plan[_BYTES], padded_bytes - plan[_BYTES])


@compiled
def _cut_one(
    data: NDArray[np.uint8],
    top: int,
    left: int,
    height: int,
    width: int,
    rows: NDArray[np.int64],
    out: NDArray[np.uint8],
) -> None:
    """Cut one file; `rows` is filled with its header and then its plan."""
    source, header = byte_pointer(data.ctypes.data), long_pointer(rows.ctypes.data)
    plan = long_pointer(integer(rows.ctypes.data) + 8 * jpeg.HEADER_FIELDS)
    jpeg.parse_header(source, integer(data.size), header)
    _plan(source, header, top, left, height, width, integer(data.size), plan)
    if plan[_OUTCOME] == CUT:
        _write(data.ctypes.data, header, plan, out.ctypes.data)
