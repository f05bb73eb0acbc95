"""Lossless rewriting of a JPEG into a crop-ready one: baseline, restart markers, and a table of segment lengths.

Coefficients and quantisation tables stay as they are, so decoded pixels stay equal. Kept besides them: the JFIF segment
(without its thumbnail), the Exif orientation, the Adobe segment. Everything else (ICC profile, comments, further
pictures behind the first) is dropped: it would travel with every cut.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from fastdata import jpeg, jpeg_entropy, jpeg_scans
from fastdata.errors import UsageError
from fastdata.jpeg import JpegHeader

Check = Literal["none", "coefficients", "pixels"]
CHECKS: Final = ("none", "coefficients", "pixels")

SEGMENT_COST_BYTES: Final = 3.5
"""What a restart marker adds on average: itself, padding, the DC value, its byte in the table, minus better codes."""
MEAN_WINDOW_WIDTH: Final = 0.66
"""Mean width of a random resized crop (scale 0.08..1) as a share of the picture's."""

DAMAGED: Final = "damaged scan"
INCOMPLETE: Final = "incomplete progressive scans"
UNUSUAL: Final = "unusual scans or tables"
GROWS: Final = "grows by more than the limit"
OUT_OF_RANGE: Final = "coefficients out of the baseline range"


def make_crop_ready(
    data: bytes | memoryview,
    *,
    max_growth: float = 0.15,
    check: Check = "coefficients",
    restart_interval: int | None = None,
) -> CropReady:
    """Rewrite one JPEG so that it can be cut before it is decoded.

    The result depends on the arguments alone. Works without the GIL for nearly all of its time.

    Args:
        data: The file.
        max_growth: Largest accepted ``new size / old size - 1``.
        check: "coefficients" decodes the result's entropy coding and compares every coefficient; "pixels" also decodes
            both files with Pillow and compares every pixel; "none" trusts the transcoder.
        restart_interval: MCUs between restart markers, a divisor of the picture's MCU columns; None: the first of
            `restart_intervals` that keeps the file within `max_growth`.

    Returns:
        The new file, or the reason why this one has to stay as it is.

    Raises:
        UsageError: An argument that is impossible.
    """
    if check not in CHECKS:
        raise UsageError("check", repr(check), " or ".join(CHECKS))
    header = jpeg.read_header(data)
    if header.refusal:
        return CropReady(None, jpeg.REFUSALS[header.refusal])
    try:
        picture = _read(np.frombuffer(data, np.uint8), header)
        intervals = restart_intervals(header) if restart_interval is None else [restart_interval]
        if not set(intervals) <= set(_divisors(picture.mcus_across)):
            raise UsageError(
                "restart_interval", str(restart_interval), f"a divisor of {picture.mcus_across} MCU columns"
            )
        written = _write_first_that_fits(picture, intervals, int(len(data) * (1 + max_growth)))
        if check != "none":
            _compare(picture, written)
        if check == "pixels":
            _compare_pixels(data, written)
    except _Untouched as reason:
        return CropReady(None, str(reason))
    return CropReady(written, "")


def restart_intervals(header: JpegHeader) -> list[int]:
    """Return the MCUs between restart markers to try for a picture, the best first, then coarser ones.

    An interval is a divisor of the MCU columns, so that every row starts a segment. Short segments cost bytes, long ones
    make cuts wider than their window. Both are shares of what is read and decoded, and the best interval has the
    smallest sum (measured in docs/crop-before-decode.md).
    """
    columns, rows = -(-header.width // header.mcu_width), -(-header.height // header.mcu_height)
    mcu_bytes = max(1, header.end_offset - header.scan_offset) / (columns * rows)

    def cost(interval: int) -> float:
        surplus = (interval - 1) * header.mcu_width / (MEAN_WINDOW_WIDTH * header.width)
        return SEGMENT_COST_BYTES / (interval * mcu_bytes) + surplus

    divisors = _divisors(columns)
    best = min(divisors, key=cost)
    return [interval for interval in divisors if interval >= best]


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


@dataclass(frozen=True, slots=True)
class CropReady:
    """What became of one file."""

    data: bytes | None
    """The crop-ready file; None where the original has to be kept."""
    reason: str
    """Why it has to be kept; "" where `data` is there."""


class _Untouched(Exception):  # noqa: N818 - an outcome, not an error
    """The file has to stay as it is, for the reason given."""


@dataclass(slots=True)
class _Picture:
    """All that a JPEG holds, in the coded order of a single interleaved scan."""

    header: JpegHeader
    kept: bytes
    """APPn segments to keep, from marker to end."""
    quantisation: bytes
    """DQT segments."""
    frame: bytes
    """The payload of the SOFn segment."""
    grids: NDArray[np.int64]
    """(components, 6): see `jpeg_scans.interleaved_order`, then blocks across and down without padding."""
    mcus_across: int
    mcus_down: int
    dc: NDArray[np.int16]
    """(blocks,)."""
    counts: NDArray[np.uint8]
    """(blocks,) AC tokens of each block."""
    tokens: NDArray[np.uint32]
    """(tokens,)."""

    @property
    def pattern(self) -> NDArray[np.int64]:
        """(blocks of an MCU,) the component of each block."""
        return np.repeat(np.arange(len(self.grids)), self.grids[:, 2] * self.grids[:, 3])


@dataclass(slots=True)
class _Tables:
    """Huffman tables and restart interval that are in force while scans are read."""

    look: NDArray[np.uint16]
    limits: NDArray[np.int64]
    values: NDArray[np.uint8]
    defined: set[int] = field(default_factory=set)
    restart_interval: int = 0

    def define(self, payload: bytes) -> None:
        """Take over the tables of a DHT segment."""
        at = 0
        while at < len(payload):
            kind = payload[at]
            counts = np.frombuffer(payload[at + 1 : at + 17], np.uint8)
            total = int(counts.sum())
            symbols = np.frombuffer(payload[at + 17 : at + 17 + total], np.uint8)
            if kind & 0xEC or len(counts) < 16 or len(symbols) < total or total > 256:
                raise _Untouched(UNUSUAL)
            row = (kind >> 4) * 4 + (kind & 3)
            if not jpeg_entropy.define_table(counts, symbols, self.look[row], self.limits[row], self.values[row]):
                raise _Untouched(UNUSUAL)
            self.defined.add(row)
            at += 17 + total

    def need(self, row: int) -> int:
        """Return `row`, which a scan names, if it is defined."""
        if row not in self.defined:
            raise _Untouched(UNUSUAL)
        return row


@dataclass(frozen=True, slots=True)
class _Scan:
    """What an SOS segment says."""

    components: tuple[int, ...]
    """Indices into the frame's components."""
    dc_tables: tuple[int, ...]
    ac_tables: tuple[int, ...]
    first_k: int
    last_k: int
    high_bit: int
    low_bit: int


def _segments(data: bytes, at: int) -> Iterator[tuple[int, int, int]]:
    """Yield (marker, payload start, payload end) from the marker at `at` to the first SOS or EOI, inclusive."""
    while True:
        if at + 2 > len(data) or data[at] != 0xFF:
            raise _Untouched(DAMAGED)
        marker = data[at + 1]
        if marker == 0xFF:
            at += 1
            continue
        if marker == 0xD9:
            yield marker, at + 2, at + 2
            return
        if marker < 0xC0 or 0xD0 <= marker <= 0xD8 or at + 4 > len(data):
            raise _Untouched(DAMAGED)
        end = at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        if end < at + 4 or end > len(data):
            raise _Untouched(DAMAGED)
        yield marker, at + 4, end
        if marker == 0xDA:
            return
        at = end


def _read(data: NDArray[np.uint8], header: JpegHeader) -> _Picture:
    """Decode a file's entropy coding."""
    tables = _Tables(*jpeg_entropy.empty_tables())
    kept, quantisation, start = {}, b"", 0
    head = data[: header.scan_offset].tobytes()
    for marker, begin, end in _segments(head, 2):
        payload = head[begin:end]
        if marker == 0xC4:
            tables.define(payload)
        elif marker == 0xDB:
            quantisation += _segment(0xDB, payload)
        elif marker == 0xDD:
            tables.restart_interval = int.from_bytes(payload, "big")
        elif marker == 0xE0 and payload[:5] == b"JFIF\0" and len(payload) >= 14:
            kept.setdefault(0, _segment(0xE0, payload[:12] + b"\0\0"))  # without the thumbnail
        elif marker == 0xEE and payload[:5] == b"Adobe" and len(payload) >= 12:
            kept[2] = _segment(0xEE, payload[:12])
        elif marker == 0xDA:
            start = begin
    if header.orientation > 1:
        kept[1] = _segment(0xE1, _exif(header.orientation))
    frame_end = header.sof_offset + 10 + 3 * header.components
    frame = head[header.sof_offset + 4 : frame_end]
    if not {frame[8 + 3 * i] for i in range(header.components)} <= _quantisation_tables(quantisation):
        raise _Untouched(UNUSUAL)
    grids, across, down = _grids(header)
    picture = _Picture(
        header=header,
        kept=b"".join(kept[key] for key in sorted(kept)),
        quantisation=quantisation,
        frame=frame,
        grids=grids,
        mcus_across=across,
        mcus_down=down,
        dc=np.empty(int((grids[:, 2] * grids[:, 3]).sum()) * across * down, np.int16),
        counts=np.empty(0, np.uint8),
        tokens=np.empty(0, np.uint32),
    )
    picture.counts = np.empty(len(picture.dc), np.uint8)
    scan = _scan(head[start:], picture)
    if header.process < 2 and len(scan.components) == header.components:
        _read_single_scan(data, scan, tables, picture)
    else:
        _read_scans(data, scan, tables, picture)
    return picture


def _grids(header: JpegHeader) -> tuple[NDArray[np.int64], int, int]:
    """Return how each component's blocks lie, and the MCUs across and down."""
    across, down = -(-header.width // header.mcu_width), -(-header.height // header.mcu_height)
    rows, first = [], 0
    widest, tallest = header.mcu_width // 8, header.mcu_height // 8
    for i in range(header.components):
        factors = 0x11 if header.components == 1 else header.sampling >> 8 * i & 0xFF
        h, v = factors >> 4, factors & 15
        blocks_across = -(-(-(-header.width * h // widest)) // 8)
        blocks_down = -(-(-(-header.height * v // tallest)) // 8)
        rows.append((first, across * h, h, v, blocks_across, blocks_down))
        first += across * h * down * v
    return np.array(rows, np.int64), across, down


def _scan(payload: bytes, picture: _Picture) -> _Scan:
    """Read an SOS payload (what follows it may hang on)."""
    count = payload[0]
    identifiers = [picture.frame[6 + 3 * i] for i in range(picture.header.components)]
    names = payload[1 : 1 + 2 * count : 2]
    components = tuple(identifiers.index(name) for name in names if name in identifiers)
    if len(components) != count or sorted(set(components)) != list(components):
        raise _Untouched(UNUSUAL)
    selectors = payload[2 : 2 + 2 * count : 2]
    if any(selector & 0xCC for selector in selectors):
        raise _Untouched(UNUSUAL)
    first_k, last_k, bits = payload[1 + 2 * count : 4 + 2 * count]
    dc, ac = tuple(s >> 4 for s in selectors), tuple(4 + (s & 15) for s in selectors)
    return _Scan(components, dc, ac, first_k, last_k, bits >> 4, bits & 15)


def _read_single_scan(data: NDArray[np.uint8], scan: _Scan, tables: _Tables, picture: _Picture) -> None:
    """Decode a baseline file of one scan straight into blocks."""
    tokens = np.empty(min(64 * len(picture.dc), 8 * len(data) + 64), np.uint32)
    at, count = jpeg_entropy.decode_scan(
        data,
        picture.header.scan_offset,
        picture.mcus_across * picture.mcus_down,
        tables.restart_interval,
        _pattern(scan, tables, picture),
        tables.look,
        tables.limits,
        tables.values,
        picture.dc,
        picture.counts,
        tokens,
    )
    if at < 0 or data[at] != 0xD9:
        raise _Untouched(DAMAGED)
    picture.tokens = tokens[:count]


def _pattern(scan: _Scan, tables: _Tables, picture: _Picture) -> NDArray[np.int64]:
    """Return (blocks of an MCU, 3) of a sequential scan: place in the scan, DC table, AC table."""
    places = np.arange(len(scan.components))
    if len(places) > 1:
        places = np.repeat(places, [picture.grids[c, 2] * picture.grids[c, 3] for c in scan.components])
    rows = [(p, tables.need(scan.dc_tables[p]), tables.need(scan.ac_tables[p])) for p in places.tolist()]
    return np.array(rows, np.int64)


def _order(scan: _Scan, picture: _Picture) -> NDArray[np.int64]:
    """Return the blocks of a scan in coded order."""
    if len(scan.components) == 1:
        first, stride, _, _, blocks_across, blocks_down = picture.grids[scan.components[0]].tolist()
        return jpeg_scans.plain_order(first, stride, blocks_across, blocks_down)
    grids = picture.grids[list(scan.components)]
    order = np.empty(int((grids[:, 2] * grids[:, 3]).sum()) * picture.mcus_across * picture.mcus_down, np.int64)
    jpeg_scans.interleaved_order(grids, picture.mcus_across, picture.mcus_down, order)
    return order


def _read_scans(data: NDArray[np.uint8], scan: _Scan, tables: _Tables, picture: _Picture) -> None:
    """Decode a file of several scans into blocks of a single one."""
    coefficients = np.zeros((len(picture.dc), 64), np.int16)
    # The lowest bit known of each coefficient, -1 for none. Where one stays above 0, decoders smooth blocks (libjpeg,
    # jdcoefct.c), which a baseline file would not repeat.
    known = np.full((picture.header.components, 64), -1)
    at, text = picture.header.scan_offset, data.tobytes()
    while True:
        at = _read_scan(data, at, scan, tables, picture, coefficients, known)
        if at < 0:
            raise _Untouched(DAMAGED)
        for marker, begin, end in _segments(text, at - 1):
            if marker == 0xC4:
                tables.define(text[begin:end])
            elif marker == 0xDD and end - begin == 2:
                tables.restart_interval = int.from_bytes(text[begin:end], "big")
            elif marker == 0xDA and end - begin == 4 + 2 * text[begin] and text[begin]:
                scan, at = _scan(text[begin:end], picture), end
            elif not (marker == 0xD9 or marker == 0xFE or 0xE0 <= marker <= 0xEF):
                raise _Untouched(UNUSUAL)
        if marker == 0xD9:
            break
    if known.any():
        raise _Untouched(INCOMPLETE)
    order = _order(_Scan(tuple(range(len(known))), (), (), 0, 63, 0, 0), picture)
    tokens = np.empty(64 * len(order), np.uint32)
    count = jpeg_scans.collapse(order, coefficients, picture.dc, picture.counts, tokens)
    if count < 0:
        raise _Untouched(OUT_OF_RANGE)
    picture.tokens = tokens[:count]


def _read_scan(
    data: NDArray[np.uint8],
    at: int,
    scan: _Scan,
    tables: _Tables,
    picture: _Picture,
    coefficients: NDArray[np.int16],
    known: NDArray[np.int64],
) -> int:
    """Decode one scan of several into `coefficients`; return where the marker byte after it lies, -1 for damage."""
    order, interval = _order(scan, picture), tables.restart_interval
    look, limits, values = tables.look, tables.limits, tables.values
    band = known[list(scan.components), scan.first_k : scan.last_k + 1]
    if picture.header.process < 2:
        if (scan.first_k, scan.last_k, scan.high_bit, scan.low_bit) != (0, 63, 0, 0) or (band != -1).any():
            raise _Untouched(UNUSUAL)
        known[list(scan.components)] = 0
        dc, counts = np.empty(len(order), np.int16), np.empty(len(order), np.uint8)
        tokens = np.empty(min(64 * len(order), 8 * len(data) + 64), np.uint32)
        pattern = _pattern(scan, tables, picture)
        mcus = len(order) // len(pattern)
        at, _ = jpeg_entropy.decode_scan(data, at, mcus, interval, pattern, look, limits, values, dc, counts, tokens)
        if at >= 0:
            jpeg_scans.expand(order, dc, counts, tokens, coefficients)
        return at
    refine = scan.high_bit > 0
    expected = scan.high_bit if refine else -1
    if (band != expected).any() or band.size == 0 or (refine and scan.high_bit != scan.low_bit + 1):
        raise _Untouched(UNUSUAL)
    if scan.low_bit > 13 or (scan.first_k == 0) != (scan.last_k == 0) or scan.last_k > 63:
        raise _Untouched(UNUSUAL)
    known[list(scan.components), scan.first_k : scan.last_k + 1] = scan.low_bit
    if scan.first_k == 0:
        places = np.arange(len(scan.components))
        if len(places) > 1:
            places = np.repeat(places, [picture.grids[c, 2] * picture.grids[c, 3] for c in scan.components])
        rows = [(p, 0 if refine else tables.need(scan.dc_tables[p]), 0) for p in places.tolist()]
        pattern = np.array(rows, np.int64)
        return jpeg_scans.decode_dc(
            data, at, order, pattern, interval, scan.low_bit, refine, look, limits, values, coefficients
        )
    if len(scan.components) != 1:
        raise _Untouched(UNUSUAL)
    row = tables.need(scan.ac_tables[0])
    decode = jpeg_scans.refine_ac if refine else jpeg_scans.decode_ac
    return decode(
        data,
        at,
        order,
        interval,
        scan.first_k,
        scan.last_k,
        scan.low_bit,
        row,
        look,
        limits,
        values,
        coefficients,
    )


def _write_first_that_fits(picture: _Picture, intervals: list[int], most_bytes: int) -> bytes:
    """Code a picture with the first interval that keeps it within `most_bytes`."""
    for interval in intervals[:-1]:
        try:
            return _write(picture, interval, most_bytes)
        except _Untouched as reason:
            if str(reason) != GROWS:
                raise
    return _write(picture, intervals[-1], most_bytes)


def _write(picture: _Picture, interval: int, most_bytes: int) -> bytes:
    """Code a picture as a crop-ready file of at most `most_bytes`."""
    pattern, mcus = picture.pattern, picture.mcus_across * picture.mcus_down
    dc, counts, tokens = picture.dc, picture.counts, picture.tokens
    frequencies = np.zeros((4, 256), np.int64)
    if not jpeg_entropy.count_symbols(pattern, mcus, interval, dc, counts, tokens, frequencies):
        raise _Untouched(OUT_OF_RANGE)
    codes, huffman = np.zeros((4, 256), np.int64), b""
    for row in range(4):
        if frequencies[row].any():
            lengths, symbols = np.zeros(16, np.uint8), np.zeros(256, np.uint8)
            used = jpeg_entropy.code_lengths(frequencies[row], lengths, symbols)
            jpeg_entropy.code_table(lengths, symbols, codes[row])
            huffman += bytes([row >> 1 << 4 | row & 1]) + lengths.tobytes() + symbols[:used].tobytes()
    out = np.empty(min(most_bytes, len(dc) * jpeg_entropy.MAX_BLOCK_BYTES) + 8192, np.uint8)
    segments = np.empty(mcus // interval, np.int64)
    size = jpeg_entropy.encode_scan(pattern, mcus, interval, dc, counts, tokens, codes, out, segments)
    if size < 0:
        raise _Untouched(GROWS)
    components = len(picture.grids)
    frame, chroma = picture.frame, b"".join(bytes([picture.frame[6 + 3 * i], 0x11]) for i in range(1, components))
    written = b"".join(
        (
            b"\xff\xd8",
            picture.kept,
            jpeg.table_segments(segments),
            picture.quantisation,
            _segment(0xC1 if _has_wide_tables(picture.quantisation) else 0xC0, frame),
            _segment(0xC4, huffman),
            _segment(0xDD, struct.pack(">H", interval)),
            _segment(0xDA, bytes([components, frame[6], 0]) + chroma + b"\0\x3f\0"),
            out[:size].tobytes(),
            b"\xff\xd9",
        )
    )
    if len(written) > most_bytes:
        raise _Untouched(GROWS)
    return written


def _segment(marker: int, payload: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(payload) + 2) + payload


def _exif(orientation: int) -> bytes:
    """Return an Exif payload that holds the orientation alone."""
    return b"Exif\0\0MM\0*" + struct.pack(">IHHHIHHI", 8, 1, 0x0112, 3, 1, orientation, 0, 0)


def _quantisation_tables(segments: bytes) -> set[int]:
    """Return the numbers of the tables that DQT segments define."""
    found: set[int] = set()
    while segments:
        end = 2 + int.from_bytes(segments[2:4], "big")
        payload, segments = segments[4:end], segments[end:]
        while payload:
            size = 1 + (128 if payload[0] >> 4 else 64)
            if payload[0] & 0xEC or len(payload) < size:
                raise _Untouched(UNUSUAL)
            found.add(payload[0] & 3)
            payload = payload[size:]
    return found


def _has_wide_tables(segments: bytes) -> bool:
    """Whether DQT segments hold 16-bit tables, which baseline (SOF0) does not allow."""
    while segments:
        end = 2 + int.from_bytes(segments[2:4], "big")
        payload, segments = segments[4:end], segments[end:]
        while payload:
            if payload[0] >> 4:
                return True
            payload = payload[65:]
    return False


def _compare(picture: _Picture, written: bytes) -> None:
    """Decode what was written and compare it with `picture`."""
    header = jpeg.read_header(written)
    again = _read(np.frombuffer(written, np.uint8), header)
    equal = (
        np.array_equal(picture.dc, again.dc)
        and np.array_equal(picture.counts, again.counts)
        and np.array_equal(picture.tokens, again.tokens)
        and (header.width, header.height, header.sampling, header.orientation)
        == (picture.header.width, picture.header.height, picture.header.sampling, picture.header.orientation)
        and picture.quantisation == again.quantisation
    )
    if not equal:
        raise AssertionError("the crop-ready file holds other coefficients than its source")


def _compare_pixels(data: bytes | memoryview, written: bytes) -> None:
    """Decode both files with Pillow and compare them."""
    from PIL import Image  # optional at import time: only this check needs a decoder

    with Image.open(io.BytesIO(data)) as source, Image.open(io.BytesIO(written)) as target:
        if source.mode != target.mode or not np.array_equal(np.asarray(source), np.asarray(target)):
            raise AssertionError("the crop-ready file decodes to other pixels than its source")
