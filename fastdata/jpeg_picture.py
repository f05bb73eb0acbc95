"""All that a JPEG holds, read without loss: its tables, and its blocks in the order of one interleaved scan.

Reads 8-bit files, sequential or progressive, Huffman-coded or arithmetic, of any number of scans. Where a decoder could
only guess, `UnreadableError` says why.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fastdata import jpeg_arithmetic, jpeg_entropy, jpeg_scans
from fastdata.jpeg import JpegHeader

DAMAGED: Final = "damaged scan"
INCOMPLETE: Final = "incomplete progressive scans"
UNUSUAL: Final = "unusual scans or tables"
OUT_OF_RANGE: Final = "coefficients out of the baseline range"

DHT, DAC, DQT, DRI, SOS, EOI, APP0, APP14, COM = 0xC4, 0xCC, 0xDB, 0xDD, 0xDA, 0xD9, 0xE0, 0xEE, 0xFE
PROGRESSIVE: Final = (2, 10)
_MAX_DC_SYMBOL: Final = 15
ARITHMETIC: Final = (9, 10)


def read_picture(data: NDArray[np.uint8], header: JpegHeader) -> Picture:
    """Read one file.

    Args:
        data: (bytes,) the file.
        header: Its header, with the `refusal` `jpeg.TAKEN` or `jpeg.ARITHMETIC`.

    Raises:
        UnreadableError: It cannot be read without guessing.
    """
    head = data[: header.scan_offset].tobytes()
    tables = _Tables()
    picture = Picture(header, frame=head[header.sof_offset + 4 : header.sof_offset + 10 + 3 * header.components])
    scan = None
    for marker, begin, end in _segments(head, 2):
        payload = head[begin:end]
        if marker == DQT:
            picture.define_quantisation(payload)
        elif marker == APP0 and payload[:5] == b"JFIF\0" and len(payload) >= 14:
            picture.jfif = payload[:12] + b"\0\0"  # without the thumbnail
        elif marker == APP14 and payload[:5] == b"Adobe" and len(payload) >= 12:
            picture.adobe = payload[:12]
        elif marker == SOS:
            scan = _read_sos(payload, picture)
        elif not tables.take(marker, payload) and begin != header.sof_offset + 4:
            raise UnreadableError(UNUSUAL)  # libjpeg refuses markers that it does not know
    if scan is None or not picture.used_tables <= set(picture.quantisation):
        raise UnreadableError(UNUSUAL)
    if header.process < 2 and len(scan.components) == header.components:
        _read_single_scan(data, scan, tables, picture)
    else:
        _read_scans(data, scan, tables, picture)
    return picture


class UnreadableError(Exception):
    """The file cannot be read, or not be kept as it is, for the reason given. Never leaves `fastdata.transcode`."""


@dataclass(slots=True)
class Picture:
    """All that a JPEG holds, in the coded order of a single interleaved scan."""

    header: JpegHeader
    frame: bytes
    """The payload of the SOFn segment."""
    jfif: bytes = b""
    """The payload of the JFIF segment, without its thumbnail."""
    adobe: bytes = b""
    """The payload of the Adobe segment."""
    quantisation: dict[int, bytes] = field(default_factory=dict)
    """By number: the byte with precision and number, and the values."""
    grids: NDArray[np.int64] = field(init=False)
    """(components, 6): see `jpeg_scans.interleaved_order`, then blocks across and down without padding."""
    mcus_across: int = field(init=False)
    mcus_down: int = field(init=False)
    dc: NDArray[np.int16] = field(init=False)
    """(blocks,)."""
    counts: NDArray[np.uint8] = field(init=False)
    """(blocks,) AC tokens of each block."""
    tokens: NDArray[np.uint32] = field(init=False)
    """(tokens,) see `jpeg_entropy`."""
    ac_frequencies: NDArray[np.int64] = field(init=False)
    """(2, 256) how often each AC symbol occurs in component 0, and in the others."""
    _orders: dict[tuple[int, ...], NDArray[np.int64]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        header = self.header
        self.mcus_across = _parts(header.width, header.mcu_width)
        self.mcus_down = _parts(header.height, header.mcu_height)
        rows, first = [], 0
        for i in range(header.components):
            factors = 0x11 if header.components == 1 else header.sampling >> 8 * i & 0xFF
            across, down = factors >> 4, factors & 15
            stride = self.mcus_across * across
            blocks_across = _parts(_parts(header.width * across, header.mcu_width // 8), 8)
            blocks_down = _parts(_parts(header.height * down, header.mcu_height // 8), 8)
            rows.append((first, stride, across, down, blocks_across, blocks_down))
            first += stride * self.mcus_down * down
        self.grids = np.array(rows, np.int64)
        self.dc, self.counts = np.empty(first, np.int16), np.empty(first, np.uint8)
        self.ac_frequencies = np.zeros((2, 256), np.int64)

    @property
    def pattern(self) -> NDArray[np.int64]:
        """(blocks of an MCU,) the component of each block."""
        return np.repeat(np.arange(len(self.grids)), self.grids[:, 2] * self.grids[:, 3])

    @property
    def used_tables(self) -> set[int]:
        """Numbers of the quantisation tables that the frame names."""
        return {self.frame[8 + 3 * i] for i in range(self.header.components)}

    def order(self, components: tuple[int, ...]) -> NDArray[np.int64]:
        """Return the blocks of a scan of `components` as they are coded."""
        order = self._orders.get(components)
        if order is None:
            order = self._orders[components] = self._find_order(components)
        return order

    def _find_order(self, components: tuple[int, ...]) -> NDArray[np.int64]:
        if len(components) == 1:
            first, stride, _, _, across, down = self.grids[components[0]].tolist()
            return jpeg_scans.plain_order(first, stride, across, down)
        grids = self.grids[list(components)]
        order = np.empty(int((grids[:, 2] * grids[:, 3]).sum()) * self.mcus_across * self.mcus_down, np.int64)
        jpeg_scans.interleaved_order(grids, self.mcus_across, self.mcus_down, order)
        return order

    def define_quantisation(self, payload: bytes) -> None:
        """Take over the tables of a DQT segment."""
        while payload:
            size = 129 if payload[0] >> 4 else 65
            if payload[0] & 0xEC or len(payload) < size:
                raise UnreadableError(UNUSUAL)
            self.quantisation[payload[0] & 3] = payload[:size]
            payload = payload[size:]


class _Tables:
    """Huffman tables, arithmetic conditioning and restart interval that are in force while scans are read."""

    def __init__(self) -> None:
        self.look, self.limits, self.values = jpeg_entropy.empty_tables()
        self.defined: set[int] = set()
        self.conditioning = jpeg_arithmetic.default_conditioning()
        self.restart_interval = 0

    def take(self, marker: int, payload: bytes) -> bool:
        """Take over a DHT, DAC or DRI segment; return whether it may stand between two scans."""
        if marker == DHT:
            while payload:
                payload = self._define(payload)
        elif marker == DAC:
            entries = zip(payload[::2], payload[1::2], strict=False)
            valid = [jpeg_arithmetic.define_conditioning(*entry, self.conditioning) for entry in entries]
            if len(payload) % 2 or not all(valid):
                raise UnreadableError(UNUSUAL)
        elif marker == DRI:
            if len(payload) != 2:
                raise UnreadableError(UNUSUAL)
            self.restart_interval = int.from_bytes(payload, "big")
        return marker in (DHT, DAC, DRI, COM) or 0xE0 <= marker <= 0xEF

    def _define(self, payload: bytes) -> bytes:
        """Define the first table of a DHT payload and return the rest of it."""
        kind, total = payload[0], sum(payload[1:17])
        if kind & 0xEC or len(payload) < 17 + total or total > 256:
            raise UnreadableError(UNUSUAL)
        counts, symbols = np.frombuffer(payload, np.uint8, 16, 1), np.frombuffer(payload, np.uint8, total, 17)
        row = (kind >> 4) * 4 + (kind & 3)
        if row < 4 and (symbols > _MAX_DC_SYMBOL).any():  # libjpeg refuses the table, used or not
            raise UnreadableError(UNUSUAL)
        if not jpeg_entropy.define_table(counts, symbols, self.look[row], self.limits[row], self.values[row]):
            raise UnreadableError(UNUSUAL)
        self.defined.add(row)
        return payload[17 + total :]

    def need(self, row: int) -> int:
        """Return `row`, which a scan names, if it is defined."""
        if row not in self.defined:
            raise UnreadableError(UNUSUAL)
        return row


@dataclass(frozen=True, slots=True)
class _Scan:
    """What an SOS segment says."""

    components: tuple[int, ...]
    """Indices into the frame's components, ascending."""
    dc_tables: tuple[int, ...]
    ac_tables: tuple[int, ...]
    """Rows of `_Tables`."""
    first_k: int
    last_k: int
    high_bit: int
    low_bit: int

    def blocks_per_mcu(self, picture: Picture) -> list[int]:
        """Return the place in the scan of each block of an MCU; a scan of one component has one block."""
        if len(self.components) == 1:
            return [0]
        sizes = picture.grids[list(self.components), 2] * picture.grids[list(self.components), 3]
        places: list[int] = np.repeat(np.arange(len(sizes)), sizes).tolist()
        return places


def _parts(count: int, size: int) -> int:
    """Return how many parts of `size` hold `count`."""
    return (count + size - 1) // size


def _segments(data: bytes | memoryview, at: int) -> Iterator[tuple[int, int, int]]:
    """Yield (marker, payload start, payload end) from the marker at `at` to the first SOS or EOI, inclusive."""
    marker = 0
    while marker not in (SOS, EOI):
        while at + 1 < len(data) and data[at] == data[at + 1] == 0xFF:  # fill bytes
            at += 1
        if at + 2 > len(data) or data[at] != 0xFF:
            raise UnreadableError(DAMAGED)
        marker, begin = data[at + 1], at + 4
        at += 2 if marker == EOI else 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        if marker < 0xC0 or 0xD0 <= marker <= 0xD8 or at > len(data) or (at < begin and marker != EOI):
            raise UnreadableError(DAMAGED)
        yield marker, begin, at


def _read_sos(payload: bytes, picture: Picture) -> _Scan:
    """Read the payload of an SOS segment."""
    count = payload[0] if payload else 0
    if count == 0 or len(payload) != 4 + 2 * count:
        raise UnreadableError(DAMAGED)
    names, selectors = payload[1 : 1 + 2 * count : 2], payload[2 : 2 + 2 * count : 2]
    identifiers = picture.frame[6 : 6 + 3 * picture.header.components : 3]
    components = tuple(map(identifiers.find, names))  # -1 for unknown ones
    if -1 in components or sorted(set(components)) != list(components) or any(s & 0xCC for s in selectors):
        raise UnreadableError(UNUSUAL)
    first_k, last_k, bits = payload[1 + 2 * count :]
    dc_tables, ac_tables = tuple(s >> 4 for s in selectors), tuple(4 + (s & 15) for s in selectors)
    return _Scan(components, dc_tables, ac_tables, first_k, last_k, bits >> 4, bits & 15)


def _read_single_scan(data: NDArray[np.uint8], scan: _Scan, tables: _Tables, picture: Picture) -> None:
    """Decode a sequential file of one scan straight into blocks."""
    into = picture.dc, picture.counts, picture.ac_frequencies
    at, picture.tokens = _decode(data, picture.header.scan_offset, scan, tables, picture, *into)
    if at < 0 or data[at] != EOI:
        raise UnreadableError(DAMAGED)


def _decode(
    data: NDArray[np.uint8],
    at: int,
    scan: _Scan,
    tables: _Tables,
    picture: Picture,
    dc: NDArray[np.int16],
    counts: NDArray[np.uint8],
    frequencies: NDArray[np.int64],
) -> tuple[int, NDArray[np.uint32]]:
    """Decode a sequential scan into the last three; return where its end marker lies, -1 for damage, and tokens."""
    places = scan.blocks_per_mcu(picture)
    pattern = np.array([(p, tables.need(scan.dc_tables[p]), tables.need(scan.ac_tables[p])) for p in places], np.int64)
    tokens = np.empty(min(64 * len(dc), 8 * len(data) + 64), np.uint32)
    mcus, huffman = len(dc) // len(places), (tables.look, tables.limits, tables.values)
    at, count = jpeg_entropy.decode_scan(
        data, at, mcus, tables.restart_interval, pattern, *huffman, dc, counts, tokens, frequencies
    )
    return at, tokens[:count]


def _read_scans(data: NDArray[np.uint8], scan: _Scan | None, tables: _Tables, picture: Picture) -> None:
    """Decode a file of several scans, or of arithmetic coding, into blocks of a single one."""
    coefficients = _Coefficients(picture)
    at, view = picture.header.scan_offset, data.data
    while scan is not None:
        at = _read_scan(data, at, scan, tables, picture, coefficients)
        if at < 0:
            raise UnreadableError(DAMAGED)
        scan, start = None, at - 1
        for marker, begin, end in _segments(view, start):
            if marker == SOS:
                scan, at = _read_sos(bytes(view[begin:end]), picture), end
            elif marker != EOI and not tables.take(marker, bytes(view[begin:end])):
                raise UnreadableError(UNUSUAL)
    if any(map(any, coefficients.known)):
        raise UnreadableError(INCOMPLETE)
    order = picture.order(tuple(range(picture.header.components)))
    tokens = np.empty(64 * len(picture.dc), np.uint32)
    into = picture.dc, picture.counts, tokens, picture.ac_frequencies
    count = jpeg_scans.collapse(order, picture.pattern, coefficients.values, coefficients.nonzero, *into)
    if count < 0:
        raise UnreadableError(OUT_OF_RANGE)
    picture.tokens = tokens[:count]


class _Coefficients:
    """What scans brought so far."""

    def __init__(self, picture: Picture) -> None:
        self.values = np.empty((len(picture.dc), 64), np.int16)
        self.values[:, 0] = 0
        self.nonzero = np.zeros(len(picture.dc), np.int64)
        # The lowest bit known of each coefficient, -1 for none. Where one stays above 0, libjpeg smooths blocks
        # (decompress_smooth_data in jdcoefct.c), which it would not do in a baseline file.
        self.known = [[-1] * 64 for _ in range(picture.header.components)]


def _read_scan(
    data: NDArray[np.uint8], at: int, scan: _Scan, tables: _Tables, picture: Picture, coefficients: _Coefficients
) -> int:
    """Decode one scan of several into `coefficients`; return where its end marker lies, -1 for damage."""
    order, interval = picture.order(scan.components), tables.restart_interval
    into = coefficients.values, coefficients.nonzero
    progressive = picture.header.process in PROGRESSIVE
    _note_known(scan, coefficients.known, progressive)
    low_bit, refine = scan.low_bit, scan.high_bit > 0
    if picture.header.process in ARITHMETIC:
        return _read_arithmetic_scan(data, at, scan, tables, picture, coefficients)
    if not progressive:
        dc, counts = np.empty(len(order), np.int16), np.empty(len(order), np.uint8)
        at, tokens = _decode(data, at, scan, tables, picture, dc, counts, np.zeros((2, 256), np.int64))
        if at >= 0:
            jpeg_scans.expand(order, dc, counts, tokens, *into)
        return at
    look, limits, values = tables.look, tables.limits, tables.values
    if scan.first_k == 0:
        places = scan.blocks_per_mcu(picture)
        pattern = np.array([(p, 0 if refine else tables.need(scan.dc_tables[p])) for p in places], np.int64)
        return jpeg_scans.decode_dc(
            data, at, order, pattern, interval, low_bit, refine, look, limits, values, coefficients.values
        )
    decode = jpeg_scans.refine_ac if refine else jpeg_scans.decode_ac
    row, band_ends = tables.need(scan.ac_tables[0]), (scan.first_k, scan.last_k)
    return decode(data, at, order, interval, *band_ends, low_bit, row, look, limits, values, *into)


def _read_arithmetic_scan(
    data: NDArray[np.uint8], at: int, scan: _Scan, tables: _Tables, picture: Picture, coefficients: _Coefficients
) -> int:
    """Like `_read_scan`."""
    places = scan.blocks_per_mcu(picture)
    return jpeg_arithmetic.decode_scan(
        data,
        at,
        picture.order(scan.components),
        np.array([(p, scan.dc_tables[p], scan.ac_tables[p] - 4) for p in places], np.int64),
        tables.restart_interval,
        np.array((scan.first_k, scan.last_k, scan.low_bit, scan.high_bit > 0), np.int64),
        tables.conditioning,
        jpeg_arithmetic.ESTIMATES,
        *jpeg_arithmetic.scratch_memory(),
        coefficients.values,
        coefficients.nonzero,
    )


def _note_known(scan: _Scan, known: list[list[int]], progressive: bool) -> None:
    """Check that a scan brings what no scan brought before, and note it (T.81, G.1.1.1)."""
    band = slice(scan.first_k, scan.last_k + 1)
    if progressive:
        fits = scan.last_k == 0 if scan.first_k == 0 else scan.last_k >= scan.first_k and len(scan.components) == 1
        fits = fits and scan.last_k < 64 and scan.low_bit <= 13
        fits = fits and (scan.high_bit == 0 or scan.high_bit == scan.low_bit + 1)
    else:
        fits = (scan.first_k, scan.last_k, scan.high_bit, scan.low_bit) == (0, 63, 0, 0)
    before, size = scan.high_bit if scan.high_bit else -1, scan.last_k + 1 - scan.first_k
    if not fits or any(known[component][band] != [before] * size for component in scan.components):
        raise UnreadableError(UNUSUAL)
    for component in scan.components:
        known[component][band] = [scan.low_bit] * size
