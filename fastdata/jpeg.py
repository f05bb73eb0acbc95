"""The structure of a JPEG file: its header, what fast decoders may take, and the table that makes it crop-ready.

Nothing here decodes pixels. Every read is bounded by the buffer's length, whatever the file claims; a file that cannot
be understood gets a reason, never an exception. Facts are those of ITU-T T.81 (JPEG), T.871 (JFIF) and TIFF 6.0 (Exif).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fastdata._native import (
    Buffer,
    Pointer,
    byte_pointer,
    compiled,
    helper,
    integer,
    larger,
    locate,
    long_pointer,
    read_i64,
    read_u16,
    read_u32,
)
from fastdata.spec import PIXEL_LIMIT

REFUSALS: Final = (
    "",
    "not a JPEG",
    "damaged JPEG header",
    "unusual JPEG header",
    "samples that are not 8-bit",
    "not 1 or 3 components",
    "lossless or hierarchical coding",
    "height defined after the scan",
    "more pixels than the limit",
    "RGB-coded JPEG",
    "unusual chroma sampling",
    "no end-of-image marker",
    "arithmetic coding",
)
"""Why fast decoders (libjpeg-turbo called directly, DALI, the GPU's engine) must not take a file, by code; "" (code 0)
where they may: they take 8-bit JPEGs of 1 or 3 components in ordinary form, the PIL reference everything else.

Where several hold, the last ones yield to the others: "arithmetic coding" stands for files that have no other fault.
"""
(
    TAKEN,
    NOT_A_JPEG,
    DAMAGED,
    UNUSUAL,
    NOT_8_BIT,
    COMPONENTS,
    CODING,
    NO_HEIGHT,
    TOO_LARGE,
    RGB_CODED,
    SAMPLING,
    NO_END,
    ARITHMETIC,
) = range(len(REFUSALS))

TABLE_MARKER: Final = 0xE9
"""APP9 holds the segment table: APP0-APP2 and APP11-APP14 have well-known owners."""
TABLE_SIGNATURE: Final = b"fastdata\x00"
TABLE_PREFIX_BYTES: Final = 12
"""Of each APP9 payload: ``fastdata`` and a zero, the version, the part's number from 0, the number of parts."""
END_SEARCH_BYTES: Final = 65_536
"""How far from the end of the file the end-of-image marker is looked for: junk and second pictures may follow it."""

_JFIF_SIGNATURE: Final = int.from_bytes(b"JFIF\x00", "big")
_EXIF_SIGNATURE: Final = int.from_bytes(b"Exif\x00\x00", "big")
_ADOBE_SIGNATURE: Final = int.from_bytes(b"Adobe", "big")
_TABLE_OPENING: Final = int.from_bytes(TABLE_SIGNATURE[:8], "big")

_NAMES: Final = (
    "refusal width height components precision process sampling mcu_width mcu_height orientation adobe jfif "
    "restart_interval sof_offset scan_offset scan_components end_offset table_offset table_end"
).split()
HEADER_DTYPE: Final = np.dtype([(name, np.int64) for name in _NAMES])
"""One header as int64 fields, in the order of `JpegHeader`, whose docstrings say what they hold."""
HEADER_FIELDS: Final = len(_NAMES)
(
    _REFUSAL,
    _WIDTH,
    _HEIGHT,
    _COMPONENTS,
    _PRECISION,
    _PROCESS,
    _SAMPLING,
    _MCU_WIDTH,
    _MCU_HEIGHT,
    _ORIENTATION,
    _ADOBE,
    _JFIF,
    _RESTART_INTERVAL,
    _SOF_OFFSET,
    _SCAN_OFFSET,
    _SCAN_COMPONENTS,
    _END_OFFSET,
    _TABLE_OFFSET,
    _TABLE_END,
) = range(HEADER_FIELDS)


def read_header(data: Buffer) -> JpegHeader:
    """Read the header of one file. Never raises for what the bytes hold: see `JpegHeader.refusal`."""
    rows = np.zeros((1, HEADER_FIELDS), np.int64)
    _read_headers(*locate((data,)), rows)
    return JpegHeader(*rows.tolist()[0])


def read_headers(buffers: Sequence[Buffer]) -> NDArray[np.void]:
    """Read the headers of many files in one call that does not hold the GIL.

    Returns:
        (n,) structured array of `HEADER_DTYPE`; ``refusal`` tells the files that could not be understood.
    """
    return read_headers_at(*locate(buffers))


def read_headers_at(addresses: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.void]:
    """Like `read_headers`, on files that lie at addresses the caller keeps alive (see `fastdata._native.locate`)."""
    rows = np.zeros((len(addresses), HEADER_FIELDS), np.int64)
    _read_headers(addresses, lengths, rows)
    return rows.view(HEADER_DTYPE).reshape(len(addresses))


@dataclass(frozen=True, slots=True)
class JpegHeader:
    """What the markers before the first scan say. All fields but `refusal` are 0 where nothing was found."""

    refusal: int
    """Index into `REFUSALS`: 0 where fast decoders may take the file."""
    width: int
    """Pixels, as stored (before the orientation is applied)."""
    height: int
    """Pixels, as stored; 0 where the file defines it after the scan."""
    components: int
    """1 gray, 3 colour, 4 CMYK or YCCK; other numbers are legal."""
    precision: int
    """Bits a sample."""
    process: int
    """n of the SOFn marker: 0 baseline, 1 extended sequential, 2 progressive, 3 lossless, 9 and 10 arithmetic, ..."""
    sampling: int
    """One byte a component, first component lowest, as stored: horizontal factor << 4 | vertical factor."""
    mcu_width: int
    """Pixels; the smallest coded block of an interleaved scan."""
    mcu_height: int
    """Pixels."""
    orientation: int
    """Exif orientation, 1..8; 1 where none is given."""
    adobe: int
    """Colour transform of the Adobe segment: 0, 1 or 2; -1 without the segment."""
    jfif: int
    """1 where a JFIF segment is there."""
    restart_interval: int
    """MCUs between restart markers; 0 without."""
    sof_offset: int
    """Bytes from the start of the file to the 0xFF of the SOFn marker."""
    scan_offset: int
    """Bytes from the start of the file to the first entropy-coded byte."""
    scan_components: int
    """Components in the first scan; fewer than `components` where the file has several scans."""
    end_offset: int
    """Bytes from the start of the file to the 0xFF of the last end-of-image marker; -1: none, so the file is cut."""
    table_offset: int
    """Bytes from the start of the file to the first marker of the segment table; 0 where there is none."""
    table_end: int
    """Bytes from the start of the file to what follows the segment table."""

    @property
    def readable(self) -> bool:
        """Whether the markers could be followed up to the first scan."""
        return self.refusal not in (NOT_A_JPEG, DAMAGED, UNUSUAL)

    @property
    def crop_ready(self) -> bool:
        """Whether the file carries a segment table. The table itself is checked when it is used."""
        return self.table_offset > 0


@helper
def _orientation(data: Pointer, start: int, end: int) -> int:
    """Return the orientation that the TIFF structure in ``data[start:end]`` gives, 1 where it gives none."""
    if end - start < 14:
        return 1
    big = data[start] == 0x4D and data[start + 1] == 0x4D
    little = data[start] == 0x49 and data[start + 1] == 0x49
    if not (big or little) or read_u16(data, start + 2, big) != 42:
        return 1
    directory = start + read_u32(data, start + 4, big)
    if directory + 2 > end:
        return 1
    found = integer(1)
    for entry in range(read_u16(data, directory, big)):
        at = directory + 2 + 12 * entry
        if at + 12 > end:
            break
        kind = read_u16(data, at + 2, big)
        if read_u16(data, at, big) != 0x0112 or read_u32(data, at + 4, big) != 1:
            continue
        if kind == 1:  # BYTE; a repeated tag counts at its last place, as in Pillow
            found = integer(data[at + 8])
        elif kind == 3:  # SHORT
            found = read_u16(data, at + 8, big)
        elif kind == 4:  # LONG
            found = read_u32(data, at + 8, big)
    return found if 1 <= found <= 8 else 1


@helper
def _frame(data: Pointer, at: int, length: int, row: Pointer) -> bool:
    """Read a SOFn segment whose marker is at `at`; return whether it is well-formed."""
    if length < 8:
        return False
    count = integer(data[at + 9])
    if length != 8 + 3 * count or count == 0:
        return False
    row[_SOF_OFFSET] = at
    row[_PROCESS] = data[at + 1] - 0xC0
    row[_PRECISION] = data[at + 4]
    row[_HEIGHT] = read_u16(data, at + 5, True)
    row[_WIDTH] = read_u16(data, at + 7, True)
    row[_COMPONENTS] = count
    widest, tallest = integer(1), integer(1)
    for i in range(count):
        factors = integer(data[at + 11 + 3 * i])
        across, down = factors >> 4, factors & 15
        if across < 1 or across > 4 or down < 1 or down > 4:
            return False
        widest, tallest = larger(widest, across), larger(tallest, down)
        if i < 4:
            row[_SAMPLING] |= factors << (8 * i)
    # A scan of one component is not interleaved: its MCU is one block, whatever the factors say (T.81, A.2.2).
    row[_MCU_WIDTH] = 8 * (1 if count == 1 else widest)
    row[_MCU_HEIGHT] = 8 * (1 if count == 1 else tallest)
    return row[_WIDTH] > 0  # type: ignore[no-any-return]


@helper
def _application(data: Pointer, at: int, end: int, row: Pointer) -> None:
    """Read the APPn segment in ``data[at:end]``. The orientation in `row` is 0 until an Exif segment has been seen."""
    marker, start, size = data[at + 1], at + 4, end - at - 4
    if size < 8:  # too short for any of these
        return
    opening = read_i64(data, start, True)
    if marker == 0xE0 and opening >> 24 == _JFIF_SIGNATURE:
        row[_JFIF] = 1
    elif marker == 0xE1 and row[_ORIENTATION] == 0 and opening >> 16 == _EXIF_SIGNATURE:
        row[_ORIENTATION] = _orientation(data, start + 6, end)
    elif marker == 0xEE and opening >> 24 == _ADOBE_SIGNATURE and size >= 12:
        row[_ADOBE] = data[start + 11]
    elif marker == TABLE_MARKER and size >= TABLE_PREFIX_BYTES and opening == _TABLE_OPENING and data[start + 8] == 0:
        if row[_TABLE_OFFSET] == 0:
            row[_TABLE_OFFSET] = at
        elif row[_TABLE_END] != at:
            row[_TABLE_OFFSET] = -1  # a table in two places is none
        row[_TABLE_END] = end


@helper
def _segment(data: Pointer, at: int, length: int, row: Pointer) -> bool:
    """Read the segment at `at`, other than APPn; return whether it is well-formed and, of a scan, has its frame."""
    marker = data[at + 1]
    if marker == 0xDA:
        if row[_SOF_OFFSET] == 0 or length < 8 or length != 6 + 2 * integer(data[at + 4]):
            return False
        row[_SCAN_COMPONENTS] = data[at + 4]
        row[_SCAN_OFFSET] = at + 2 + length
        return True
    if marker == 0xDD:
        row[_RESTART_INTERVAL] = read_u16(data, at + 4, True) if length == 4 else 0
        return length == 4
    if 0xC0 <= marker <= 0xCF and marker != 0xC4 and marker != 0xC8 and marker != 0xCC:
        return row[_SOF_OFFSET] == 0 and _frame(data, at, length, row)
    return True


@helper
def _markers(data: Pointer, size: int, row: Pointer) -> int:
    """Follow the markers up to the first scan, filling `row`; return TAKEN, NOT_A_JPEG, DAMAGED or UNUSUAL."""
    if size < 4 or data[0] != 0xFF or data[1] != 0xD8 or data[2] != 0xFF:
        return NOT_A_JPEG
    at = integer(2)
    while row[_SCAN_OFFSET] == 0:
        if at + 4 > size:
            return DAMAGED
        marker = integer(data[at + 1])
        if data[at] == 0xFF and marker == 0xFF:  # fill byte (T.81, B.1.1.2)
            at += 1
            continue
        # Restart, start, end and hierarchical markers have no length, and none is expected here; others are reserved.
        if data[at] != 0xFF or marker < 0xC0 or 0xD0 <= marker <= 0xD9 or marker == 0xDE or marker == 0xDF:
            return UNUSUAL  # such as junk between segments, which some decoders skip
        length = read_u16(data, at + 2, True)
        if length < 2 or at + 2 + length > size:
            return DAMAGED
        if 0xE0 <= marker <= 0xEF:
            _application(data, at, at + 2 + length, row)
        elif not _segment(data, at, length, row):
            return DAMAGED
        at += 2 + length
    return TAKEN


@helper
def _end_offset(data: Pointer, size: int, start: int) -> int:
    """Return where the last end-of-image marker lies, or -1 where none does near the end."""
    at = size - 2
    least = larger(start, at - END_SEARCH_BYTES)
    while at >= least:
        if data[at] == 0xFF and data[at + 1] == 0xD9:
            return at
        at -= 1
    return -1


@helper
def _refusal(data: Pointer, row: Pointer) -> int:
    """Return the first reason why fast decoders must not take the file whose markers were followed into `row`."""
    arithmetic = row[_PROCESS] == 9 or row[_PROCESS] == 10
    if row[_PRECISION] != 8:
        return NOT_8_BIT
    if row[_COMPONENTS] != 1 and row[_COMPONENTS] != 3:
        return COMPONENTS
    if row[_PROCESS] > 2 and not arithmetic:
        return CODING
    if row[_HEIGHT] == 0:
        return NO_HEIGHT
    if row[_WIDTH] * row[_HEIGHT] > PIXEL_LIMIT:
        return TOO_LARGE
    if row[_COMPONENTS] == 3:
        # RGB by the rule that libjpeg follows: Adobe's transform 0, or without Adobe's segment, components "RGB".
        ids = row[_SOF_OFFSET] + 10
        named_rgb = data[ids] == 0x52 and data[ids + 3] == 0x47 and data[ids + 6] == 0x42
        if row[_JFIF] == 0 and (row[_ADOBE] == 0 or (row[_ADOBE] < 0 and named_rgb)):
            return RGB_CODED
        # 4:4:4, 4:2:2, 4:2:0, 4:4:0, 4:1:1 and 4:4:1 in their plain form: chroma 1 x 1, luma up to 4 samples, not 3.
        across, down = (row[_SAMPLING] >> 4) & 15, row[_SAMPLING] & 15
        if row[_SAMPLING] >> 8 != 0x1111 or across * down > 4 or across == 3 or down == 3:
            return SAMPLING
    if row[_END_OFFSET] < 0:
        return NO_END
    return ARITHMETIC if arithmetic else TAKEN


@compiled
def _read_headers(addresses: NDArray[np.int64], lengths: NDArray[np.int64], rows: NDArray[np.int64]) -> None:
    """Fill rows of zeros as `HEADER_DTYPE` says."""
    for i in range(len(addresses)):
        data, size = byte_pointer(addresses[i]), lengths[i]
        row = long_pointer(integer(rows.ctypes.data) + 8 * HEADER_FIELDS * i)
        row[_ADOBE], row[_END_OFFSET] = -1, -1
        row[_REFUSAL] = _markers(data, size, row)
        row[_ORIENTATION] = larger(row[_ORIENTATION], 1)
        if row[_REFUSAL] == TAKEN:
            row[_TABLE_OFFSET] = larger(row[_TABLE_OFFSET], 0)
            row[_END_OFFSET] = _end_offset(data, size, row[_SCAN_OFFSET])
            row[_REFUSAL] = _refusal(data, row)
