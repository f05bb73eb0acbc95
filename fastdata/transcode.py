"""Lossless rewriting of a JPEG into a crop-ready one: baseline, restart markers, and a table of segment lengths.

Coefficients and quantisation tables stay as they are, so decoded pixels stay equal. Kept besides them: the JFIF segment
(without its thumbnail), the Exif orientation, the Adobe segment. Everything else (ICC profile, comments, further
pictures behind the first) is dropped: it would travel with every cut.
"""

from __future__ import annotations

import io
import struct
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from fastdata import jpeg, jpeg_encode, jpeg_segments
from fastdata.errors import UsageError
from fastdata.jpeg import JpegHeader
from fastdata.jpeg_picture import OUT_OF_RANGE, Picture, UnreadableError, read_picture

Check = Literal["none", "coefficients", "pixels"]
CHECKS: Final = ("none", "coefficients", "pixels")

SEGMENT_COST_BYTES: Final = 3.5
"""What a restart marker adds on average: itself, padding, the DC value, its byte in the table, minus better codes."""
MEAN_WINDOW_WIDTH: Final = 0.66
"""Mean width of a random resized crop (scale 0.08..1) as a share of the picture's."""

GROWS: Final = "grows by more than the limit"
DIFFERS: Final = "differs after transcoding"
REFUSED: Final = "Pillow cannot decode it"


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
    if header.refusal not in (jpeg.TAKEN, jpeg.ARITHMETIC):
        return CropReady(None, jpeg.REFUSALS[header.refusal])
    try:
        picture = read_picture(np.frombuffer(data, np.uint8), header)
        intervals = restart_intervals(header) if restart_interval is None else [restart_interval]
        if not set(intervals) <= set(_divisors(picture.mcus_across)):
            expected = f"a divisor of {picture.mcus_across}, the MCU columns"
            raise UsageError("restart_interval", str(restart_interval), expected)
        written = _write_first_that_fits(picture, intervals, int(len(data) * (1 + max_growth)))
        if check != "none":
            _compare(picture, written)
        if check == "pixels":
            _compare_pixels(data, written)
    except UnreadableError as reason:
        return CropReady(None, str(reason))
    return CropReady(written, "")


def restart_intervals(header: JpegHeader) -> list[int]:
    """Return the MCUs between restart markers to try for a picture, the best first, then coarser ones.

    An interval is a divisor of the MCU columns, so that every row starts a segment. Short segments cost bytes, long
    ones make cuts wider than their window. Both are shares of what is read and decoded, and the best interval has the
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


def _write_first_that_fits(picture: Picture, intervals: list[int], most_bytes: int) -> bytes:
    """Code a picture with the first interval that keeps it within `most_bytes`."""
    for interval in intervals[:-1]:
        try:
            return _write(picture, interval, most_bytes)
        except UnreadableError as reason:
            if str(reason) != GROWS:
                raise
    return _write(picture, intervals[-1], most_bytes)


def _write(picture: Picture, interval: int, most_bytes: int) -> bytes:
    """Code a picture as a crop-ready file of at most `most_bytes`."""
    pattern, mcus = picture.pattern, picture.mcus_across * picture.mcus_down
    blocks = picture.dc, picture.counts, picture.tokens
    dc_frequencies = np.zeros((2, 256), np.int64)
    if not jpeg_encode.count_differences(pattern, mcus, interval, picture.dc, dc_frequencies):
        raise UnreadableError(OUT_OF_RANGE)
    codes, huffman = _best_codes(np.concatenate((dc_frequencies, picture.ac_frequencies)))
    out = np.empty(min(most_bytes, len(picture.dc) * jpeg_encode.MAX_BLOCK_BYTES) + 8192, np.uint8)
    lengths = np.empty(mcus // interval, np.int64)
    size = jpeg_encode.encode_scan(pattern, mcus, interval, *blocks, codes, out, lengths)
    if size < 0:
        raise UnreadableError(GROWS)
    components, frame, orientation = picture.header.components, picture.frame, picture.header.orientation
    quantisation = [picture.quantisation[number] for number in sorted(picture.used_tables)]
    wide = any(table[0] >> 4 for table in quantisation)  # baseline (SOF0) allows 8-bit tables alone
    selectors = b"".join(bytes([frame[6 + 3 * i], 0x11 if i else 0]) for i in range(components))
    written = b"".join(
        (
            b"\xff\xd8",
            _segment(0xE0, picture.jfif) if picture.jfif else b"",
            _segment(0xE1, _exif(orientation)) if orientation > 1 else b"",
            _segment(0xEE, picture.adobe) if picture.adobe else b"",
            jpeg_segments.table_segments(lengths),
            _segment(0xDB, b"".join(quantisation)),
            _segment(0xC1 if wide else 0xC0, frame),
            _segment(0xC4, huffman),
            _segment(0xDD, struct.pack(">H", interval)),
            _segment(0xDA, bytes([components]) + selectors + b"\0\x3f\0"),
            out[:size].tobytes(),
            b"\xff\xd9",
        )
    )
    if len(written) > most_bytes:
        raise UnreadableError(GROWS)
    return written


def _best_codes(frequencies: NDArray[np.int64]) -> tuple[NDArray[np.int64], bytes]:
    """Return the codes that suit `frequencies` (see `encode_scan`), and a DHT segment's payload that defines them."""
    codes, payload = np.zeros((4, 256), np.int64), b""
    for row in np.flatnonzero(frequencies.any(axis=1)).tolist():
        counts, symbols = np.zeros(16, np.uint8), np.zeros(256, np.uint8)
        used = jpeg_encode.code_lengths(frequencies[row], counts, symbols)
        jpeg_encode.code_table(counts, symbols, codes[row])
        payload += bytes([row >> 1 << 4 | row & 1]) + counts.tobytes() + symbols[:used].tobytes()
    return codes, payload


def _segment(marker: int, payload: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(payload) + 2) + payload


def _exif(orientation: int) -> bytes:
    """Return an Exif payload that holds the orientation alone."""
    return b"Exif\0\0MM\0*" + struct.pack(">IHHHIHHI", 8, 1, 0x0112, 3, 1, orientation, 0, 0)


def _compare(picture: Picture, written: bytes) -> None:
    """Decode what was written and compare it with `picture`."""
    header = jpeg.read_header(written)
    again = read_picture(np.frombuffer(written, np.uint8), header)
    of_header = ("width", "height", "components", "sampling", "orientation", "adobe", "jfif")
    equal = (
        header.crop_ready
        and all(getattr(header, name) == getattr(picture.header, name) for name in of_header)
        and all(again.quantisation[number] == picture.quantisation[number] for number in picture.used_tables)
        and np.array_equal(picture.dc, again.dc)
        and np.array_equal(picture.counts, again.counts)
        and np.array_equal(picture.tokens, again.tokens)
    )
    if not equal:
        raise UnreadableError(DIFFERS)


def _compare_pixels(data: bytes | memoryview, written: bytes) -> None:
    """Decode both files with Pillow and compare them."""
    from PIL import Image  # only this check needs a decoder

    try:
        with Image.open(io.BytesIO(data)) as source, Image.open(io.BytesIO(written)) as target:
            source.decodermaxblock = len(data)  # see fastdata.decode: arithmetic coding is decoded in one go
            equal = source.mode == target.mode and np.array_equal(np.asarray(source), np.asarray(target))
    except (OSError, SyntaxError) as exc:
        raise UnreadableError(REFUSED) from exc
    if not equal:
        raise UnreadableError(DIFFERS)
