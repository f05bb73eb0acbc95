"""Pictures shrunk to a short side, turned upright, and saved as JPEG."""

from __future__ import annotations

import io
from dataclasses import dataclass

from fastdata.errors import DecodeError
from fastdata.shards.facts import PictureFacts


@dataclass(frozen=True, slots=True)
class Resizer:
    """Shrinks pictures whose short side is longer than asked; others stay as they are, byte for byte."""

    short_side: int
    """Pixels."""
    quality: int
    """Of the JPEG, 1..95."""

    def __call__(self, data: bytes, facts: PictureFacts) -> bytes | None:
        """Return the bytes of the smaller picture, or None where it is small enough.

        Raises:
            DecodeError: The picture cannot be decoded.
        """
        if min(facts.width, facts.height) <= self.short_side:
            return None
        from PIL import Image, ImageOps  # here, since it is needed only for pictures that are shrunk

        try:
            with Image.open(io.BytesIO(data)) as image:
                upright = ImageOps.exif_transpose(to_rgb(image))
        except Exception as exc:  # Pillow's plug-ins raise whatever they like on damaged files
            raise DecodeError("", f"{type(exc).__name__}: {exc}", "a picture that decodes") from exc
        width, height = upright.size
        scale = self.short_side / min(width, height)
        size = (max(1, round(width * scale)), max(1, round(height * scale)))
        out = io.BytesIO()
        # Bilinear in Pillow widens its kernel when it shrinks, so it is antialiased: the reference of this package.
        upright.resize(size, Image.Resampling.BILINEAR).save(out, "JPEG", quality=self.quality)
        return out.getvalue()


def to_rgb(image):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    return image.convert("RGB")
