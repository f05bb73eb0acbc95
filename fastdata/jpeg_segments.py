"""The segment table of a crop-ready JPEG: how many bytes lie between its restart markers, kept in the file itself.

It lies in APP9 segments side by side, each with a prefix (`fastdata.jpeg.TABLE_PREFIX_BYTES`): ``fastdata`` and a zero,
the version, the part's number from 0, the number of parts. What follows the prefixes is one stream: each length takes
one byte, or 255 and four bytes, highest first.
"""

from __future__ import annotations

import struct
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fastdata._native import Pointer, helper, integer, larger, read_u16
from fastdata.jpeg import TABLE_MARKER, TABLE_PREFIX_BYTES, TABLE_SIGNATURE

TABLE_VERSION: Final = 1
LONG_LENGTH: Final = 255
"""Marks an entry of the table whose length takes four more bytes."""
_PREFIX: Final = 4 + TABLE_PREFIX_BYTES


def table_segments(lengths: NDArray[np.int64]) -> bytes:
    """Return the APP9 segments that hold the segment table of a crop-ready file.

    Args:
        lengths: (segments,) bytes between two restart markers, in file order.
    """
    long = lengths >= LONG_LENGTH
    ends = np.cumsum(np.where(long, 5, 1))
    stream = np.empty(int(ends[-1]), np.uint8)
    stream[ends[~long] - 1] = lengths[~long]
    stream[ends[long] - 5] = LONG_LENGTH
    for i in range(4):
        stream[ends[long] - 4 + i] = lengths[long] >> (24 - 8 * i) & 0xFF
    room = 65_533 - TABLE_PREFIX_BYTES
    parts = [stream[start : start + room].tobytes() for start in range(0, len(stream), room)]
    segments = b""
    for number, part in enumerate(parts):
        prefix = TABLE_SIGNATURE + bytes([TABLE_VERSION, number, len(parts)])
        segments += struct.pack(">BBH", 0xFF, TABLE_MARKER, 2 + len(prefix) + len(part)) + prefix + part
    return segments


@helper
def _next_row_by_bytes(
    source: Pointer, at: int, part_end: int, table_end: int, across: int, count: int, ends: Pointer
) -> tuple[int, int, int]:
    """Do as `next_row`, for a row that holds long lengths or ends in another part of the table."""
    segment, length, missing_bytes, end = 0, 0, 0, integer(0)
    while segment < across:
        if at == part_end:
            if at >= table_end:
                return at, part_end, -1
            part_end = at + 2 + read_u16(source, at + 2, True)
            at += _PREFIX
        length = (length << 8) | integer(source[at])
        at += 1
        if missing_bytes == 0 and length == LONG_LENGTH:
            length, missing_bytes = 0, 4
            continue
        missing_bytes = larger(missing_bytes - 1, 0)
        if missing_bytes:
            continue
        if length == 0:
            return at, part_end, -1
        end += length + 2
        if segment < count:
            ends[segment] = end
        segment, length = segment + 1, 0
    return at, part_end, end


@helper
def next_row(
    source: Pointer, at: int, part_end: int, table_end: int, across: int, count: int, ends: Pointer
) -> tuple[int, int, int]:
    """Read the lengths of one row of segments.

    Args:
        source: The file.
        at: Where the table is read next.
        part_end: Where the current part of the table ends.
        table_end: Where the table ends.
        across: Segments of a row.
        count: How many of them to fill into `ends`.
        ends: Filled with where the first `count` segments end, markers included, from the start of the row.

    Returns:
        `at` and `part_end` after the row, and the bytes of the row, -1 where the table holds a length of 0 or ends.
    """
    if at + across <= part_end:
        total, special = 0, False
        for i in range(across):
            length = integer(source[at + i])
            total += length + 2
            special |= (length == 0) | (length == LONG_LENGTH)
        if not special:
            end = integer(0)
            for i in range(count):
                end += integer(source[at + i]) + 2
                ends[i] = end
            return at + across, part_end, total
    return _next_row_by_bytes(source, at, part_end, table_end, across, count, ends)


@helper
def parts_fit(source: Pointer, table: int, table_end: int) -> bool:
    """Whether the parts of a segment table are numbered as they should be and end where they should."""
    at, part, parts = table, 0, integer(source[table + 15])
    while at < table_end:
        size = read_u16(source, at + 2, True)
        if source[at + 13] != TABLE_VERSION or source[at + 14] != part or source[at + 15] != parts:
            return False
        if size + 2 <= _PREFIX:
            return False
        at += 2 + size
        part += 1
    return at == table_end and part == parts
