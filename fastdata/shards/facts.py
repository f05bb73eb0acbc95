"""What a file's first bytes say: its type by content, size in pixels and orientation; or why it is no picture."""

from __future__ import annotations

import io
from dataclasses import dataclass

from fastdata.errors import DecodeError

_EXTENSIONS = {"JPEG": "jpg", "MPO": "jpg", "PNG": "png", "WEBP": "webp", "BMP": "bmp", "DIB": "bmp", "GIF": "gif",
               "TIFF": "tif", "PPM": "ppm", "AVIF": "avif"}  # fmt: skip
_ORIENTATION_TAG = 0x0112


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


def read_facts(data: bytes | memoryview) -> PictureFacts:
    """Read the header of a picture.

    Raises:
        DecodeError: It is empty, cut, no picture, or larger than the pixel limit.
    """
    if not data:
        raise DecodeError("", "0 bytes", "a picture")
    return _pillow_facts(data)


def _pillow_facts(data: bytes | memoryview) -> PictureFacts:
    from PIL import Image  # here, since folders of plain JPEGs never need it

    try:
        with Image.open(io.BytesIO(data)) as image:
            kind, (width, height) = image.format or "", image.size
            orientation = int(image.getexif().get(_ORIENTATION_TAG, 1))
    except Exception as exc:  # Pillow's plug-ins raise whatever they like on damaged files
        reason = "no picture that Pillow knows" if "cannot identify" in str(exc) else f"{type(exc).__name__}: {exc}"
        raise DecodeError("", f"{reason} ({len(data)} bytes, starting {bytes(data[:8])!r})", "a picture") from exc
    if kind not in _EXTENSIONS:
        raise DecodeError("", f"a {kind} file", "one of " + ", ".join(sorted(_EXTENSIONS)))
    return PictureFacts(_EXTENSIONS[kind], width, height, orientation if 1 <= orientation <= 8 else 1)
