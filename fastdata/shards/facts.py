"""What a file's first bytes say: its type by content, size in pixels and orientation; or why it is no picture."""

from __future__ import annotations

from dataclasses import dataclass

from fastdata import jpeg
from fastdata.decode import decode_reference, reference_size
from fastdata.errors import DecodeError

# What a JPEG's header cannot promise is tried: these may decode or not, and are rare.
_TRY = frozenset(
    (
        jpeg.NOT_A_JPEG,
        jpeg.DAMAGED,
        jpeg.UNUSUAL,
        jpeg.NOT_8_BIT,
        jpeg.CODING,
        jpeg.NO_HEIGHT,
        jpeg.TOO_LARGE,
        jpeg.NO_END,
        jpeg.ARITHMETIC,
    )
)
_MAGIC = (
    (b"\xff\xd8", "jpg"),
    (b"\x89PNG\r\n\x1a\n", "png"),
    (b"BM", "bmp"),
    (b"GIF8", "gif"),
    (b"II*\0", "tif"),
    (b"MM\0*", "tif"),
    *((b"P%d" % n, "ppm") for n in range(1, 7)),
)


@dataclass(frozen=True, slots=True)
class PictureFacts:
    """What the header of a picture says."""

    extension: str
    """By content, whatever the file is called: "jpg", "png", "webp", ..."""
    width: int
    """Pixels as stored, before the orientation is applied."""
    height: int
    """Pixels as stored."""
    orientation: int
    """Exif orientation, 1..8; 1 where none is given."""
    progressive: bool = False
    """Whether it is a JPEG with progressive scans."""
    refusal: int = 0
    """Why fast decoders must not take it: an index into `fastdata.jpeg.REFUSALS`, 0 where they may."""


def sniff_extension(data: bytes | memoryview) -> str:
    """Return the file name extension that the content of a picture asks for, "" where it is none we know."""
    head = bytes(data[:16])
    for magic, extension in _MAGIC:
        if head.startswith(magic):
            return extension
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "webp"
    return "avif" if head[4:12] in (b"ftypavif", b"ftypavis") else ""


def read_facts(data: bytes | memoryview) -> PictureFacts:
    """Read the header of a picture.

    Damage behind the header is not seen, but for a JPEG without an end: it is decoded, and refused where that fails.

    Raises:
        DecodeError: It is empty, no picture, cannot be decoded, or larger than the pixel limit.
    """
    if not data:
        raise DecodeError("", "0 bytes", "a picture")
    extension = sniff_extension(data)
    if not extension:
        raise DecodeError("", f"no picture: {len(data)} bytes that start with {bytes(data[:12])!r}", "a picture")
    if extension == "jpg":
        header = jpeg.read_header(data)
        if header.refusal not in _TRY:
            return PictureFacts(
                "jpg", header.width, header.height, header.orientation, header.process == 2, header.refusal
            )
        decode_reference(data)
    size = reference_size(data)
    refusal = header.refusal if extension == "jpg" else jpeg.NOT_A_JPEG
    return PictureFacts(extension, size.width, size.height, size.orientation, False, refusal)
