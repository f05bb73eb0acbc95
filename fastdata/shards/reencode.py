"""What shards may hold instead of the original files: pictures shrunk to a short side, and crop-ready JPEGs."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fastdata.decode import decode_reference, decode_turbo, orient
from fastdata.errors import DecodeError
from fastdata.shards.facts import PictureFacts, read_facts
from fastdata.shards.options import ConvertOptions
from fastdata.transcode import Check, make_crop_ready


@dataclass(frozen=True, slots=True)
class Reencoded:
    """What became of one file."""

    data: bytes | None
    """Its new bytes; None where it stays as it is."""
    note: str
    """What was done, or why nothing was; counted in the index."""
    not_crop_ready: str = ""
    """Why the picture could not be made crop-ready; "" where it is, or where that was not asked for."""


Reencode = Callable[[bytes, PictureFacts], Reencoded]


def make_reencode(options: ConvertOptions) -> Reencode | None:
    """Return what re-encodes pictures as the options ask, or None where they are stored as they are."""
    shrink = Shrink(options.resize, options.quality) if options.resize is not None else None
    if not options.crop_ready:
        return shrink
    ready = MakeCropReady(options.max_growth, options.check)
    return ready if shrink is None else _Both(shrink, ready)


@dataclass(frozen=True, slots=True)
class MakeCropReady:
    """Rewrites JPEGs so that they can be cut before they are decoded; pixels stay equal."""

    max_growth: float
    """Files that would grow by a larger share stay as they are."""
    check: Check
    """What is compared afterwards."""

    def __call__(self, data: bytes, _facts: PictureFacts) -> Reencoded:
        """Return the new file, or why this one stays as it is."""
        made = make_crop_ready(data, max_growth=self.max_growth, check=self.check)
        return Reencoded(made.data, made.reason or "crop-ready", made.reason)


@dataclass(frozen=True, slots=True)
class Shrink:
    """Shrinks pictures whose short side is longer than asked; others stay as they are, byte for byte."""

    short_side: int
    """Pixels."""
    quality: int
    """Of the JPEG, 1..95."""

    def __call__(self, data: bytes, facts: PictureFacts) -> Reencoded:
        """Return the smaller picture, upright, as a JPEG without metadata.

        Raises:
            DecodeError: The picture cannot be decoded.
        """
        if min(facts.width, facts.height) <= self.short_side:
            return Reencoded(None, "small enough")
        from PIL import Image  # here, since it is needed only for pictures that are shrunk

        pixels = orient(_decode(data, facts), facts.orientation)
        height, width = pixels.shape[:2]
        scale = self.short_side / min(width, height)
        size = (max(1, round(width * scale)), max(1, round(height * scale)))
        out = io.BytesIO()
        # Pillow widens the kernel when it shrinks, so this is antialiased: the reference of this package.
        small = Image.fromarray(pixels).resize(size, Image.Resampling.BILINEAR)
        small.save(out, "JPEG", quality=self.quality)
        return Reencoded(out.getvalue(), "resized")


@dataclass(frozen=True, slots=True)
class _Both:
    shrink: Shrink
    ready: MakeCropReady

    def __call__(self, data: bytes, facts: PictureFacts) -> Reencoded:
        small = self.shrink(data, facts)
        if small.data is None:
            return self.ready(data, facts)
        made = self.ready(small.data, read_facts(small.data))
        return Reencoded(made.data or small.data, f"{small.note}, {made.note}", made.not_crop_ready)


def _decode(data: bytes, facts: PictureFacts) -> NDArray[np.uint8]:
    if facts.refusal == 0:
        try:
            return decode_turbo(data)
        except DecodeError:  # strict about damage that the reference forgives
            pass
    return decode_reference(data)
