"""Draw docs/images/crop-before-decode.png: a picture, the window that is wanted, and which bytes of the file are kept.

Everything is computed from a real cut of a picture that is drawn here: ``python tools/draw_crop_before_decode.py``.
"""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from fastdata import jpeg, jpeg_cut, transcode

OUT = Path(__file__).resolve().parent.parent / "docs" / "images" / "crop-before-decode.png"
WINDOW = (75, 190, 120, 130)
"""Top, left, height, width."""
SIZE = (480, 320)
"""Width and height of the picture."""
INTERVAL = 2
"""MCUs between restart markers, 16 pixels each in 4:2:0."""
Colour = tuple[int, int, int]

INK, SOFT, PAPER = (28, 25, 23), (120, 113, 108), (250, 250, 249)
KEPT, LEFT_OUT, HEAD, WANTED = (43, 138, 87), (214, 211, 209), (47, 111, 183), (230, 60, 40)
MARGIN, STRIP = 24, 26


def landscape(width: int, height: int) -> NDArray[np.uint8]:
    """Return (height, width, 3) uint8: hills, a sun and a sail."""
    y, x = np.mgrid[0:height, 0:width].astype(float)
    share = (y / height)[..., None]
    picture = (1 - share) * np.array([120, 170, 230.0]) + share * np.array([250, 220, 190.0])
    sun = np.hypot(x - 0.75 * width, y - 0.22 * height) < 26
    picture[sun] = (255, 236, 150)
    for i, colour in enumerate([(120, 140, 160), (70, 120, 100), (40, 90, 110)]):
        edge = height * (0.45 + 0.13 * i) + 18 * np.sin(x / (50 + 13 * i) + 2 * i) + 7 * np.sin(x / 17 + i)
        picture[y > edge] = colour
    sail = (x > 225) & (x < 225 + (y - 95) * 0.62) & (y > 95) & (y < 178)
    picture[sail] = (245, 245, 240)
    hull = (np.abs(x - 248) < 42 - (y - 180) * 1.1) & (y > 180) & (y < 196)
    picture[hull] = (150, 50, 40)
    waves = 6 * np.sin(x / 5 + y / 3)[..., None] * (y > height * 0.7)[..., None]
    return (picture + waves).clip(0, 255).astype(np.uint8)


def segment_lengths(data: bytes, header: jpeg.JpegHeader) -> list[int]:
    """Return the bytes between restart markers, found by looking for the markers."""
    scan = np.frombuffer(data, np.uint8)[header.scan_offset : header.end_offset + 2]
    marks = np.flatnonzero((scan[:-1] == 0xFF) & (scan[1:] >= 0xD0) & (scan[1:] <= 0xD9))
    return np.diff(np.concatenate([[-2], marks]), 1).astype(int).tolist()


def draw_picture(canvas: Image.Image, at: tuple[int, int], full: Image.Image, where: jpeg_cut.Cut, step: int) -> None:
    """Draw the picture with its segments, those outside of the cut faded."""
    faded = Image.blend(full, Image.new("RGB", full.size, PAPER), 0.62)
    box = (where.left, where.top, where.left + where.width, where.top + where.height)
    faded.paste(full.crop(box), box[:2])
    pen = ImageDraw.Draw(faded)
    for x in range(0, full.width, step):
        pen.line([(x, 0), (x, full.height)], fill=(255, 255, 255))
    for y in range(0, full.height, 16):
        pen.line([(0, y), (full.width, y)], fill=(255, 255, 255))
    pen.rectangle(box, outline=KEPT, width=3)
    top, left, height, width = WINDOW
    pen.rectangle((left, top, left + width - 1, top + height - 1), outline=WANTED, width=3)
    canvas.paste(faded, at)


def draw_bytes(pen: ImageDraw.ImageDraw, at: tuple[int, int], parts: list[tuple[int, Colour]], scale: float) -> None:
    """Draw a file as a strip: (bytes, colour) from left to right."""
    place = 0.0
    for size, colour in parts:
        pen.rectangle((at[0] + place, at[1], at[0] + place + size * scale, at[1] + STRIP), fill=colour)
        place += size * scale


def main() -> None:
    """Cut a picture and draw what happened."""
    target = io.BytesIO()
    Image.fromarray(landscape(*SIZE)).save(target, "JPEG", quality=88, subsampling="4:2:0")
    ready = transcode.make_crop_ready(target.getvalue(), max_growth=9, restart_interval=INTERVAL).data
    assert ready is not None
    header = jpeg.read_header(ready)
    small, where = jpeg_cut.cut(ready, WINDOW)
    full, cut = Image.open(io.BytesIO(ready)).convert("RGB"), Image.open(io.BytesIO(bytes(small))).convert("RGB")
    top, left, height, width = WINDOW
    wanted = np.asarray(full)[top : top + height, left : left + width]
    y, x = top - where.top, left - where.left
    assert np.array_equal(np.asarray(cut)[y : y + height, x : x + width], wanted)

    step = header.mcu_width * header.restart_interval
    lengths, across = segment_lengths(ready, header), -(-SIZE[0] // step)
    canvas = Image.new("RGB", (2 * MARGIN + 480 + 40 + 240, 520), PAPER)
    pen, font, small_font = ImageDraw.Draw(canvas), ImageFont.load_default(15), ImageFont.load_default(13)
    draw_picture(canvas, (MARGIN, 44), full, where, step)
    pen.text((MARGIN, 16), "The stored picture: red the window, green what is cut out", fill=INK, font=font)
    right = MARGIN + 480 + 40
    pen.text((right, 16), "The cut: a JPEG of its own", fill=INK, font=font)
    canvas.paste(cut, (right, 44))
    pen.rectangle((right + x, 44 + y, right + x + width - 1, 44 + y + height - 1), outline=WANTED, width=3)
    notes = [
        f"{SIZE[0]} x {SIZE[1]} pixels, {len(ready):,} bytes",
        f"cut to {where.width} x {where.height}, {where.bytes:,} bytes",
        "Each white cell is one segment",
        "between two restart markers.",
        "Inside the red window both",
        "decode to the same pixels.",
    ]
    for i, line in enumerate(notes):
        pen.text((right, 44 + where.height + 16 + 20 * i), line, fill=SOFT, font=small_font)

    rows = range(where.top // 16, -(-(where.top + where.height) // 16))
    columns = range(where.left // step, -(-(where.left + where.width) // step))
    kept = [i // across in rows and i % across in columns for i in range(len(lengths))]
    table = header.table_end - header.table_offset
    whole = [(header.scan_offset - table, HEAD), (table, SOFT)]
    whole += [(size, KEPT if keep else LEFT_OUT) for size, keep in zip(lengths, kept, strict=True)]
    part = [(header.scan_offset - table, HEAD)] + [
        (size, KEPT) for size, keep in zip(lengths, kept, strict=True) if keep
    ]
    scale = (canvas.width - 2 * MARGIN) / len(ready)
    pen.text((MARGIN, 380), "Bytes of the file: header, segment table, segments row by row", fill=INK, font=font)
    draw_bytes(pen, (MARGIN, 402), whole, scale)
    pen.text((MARGIN, 446), "Bytes of the cut: header with another size, the wanted segments", fill=INK, font=font)
    draw_bytes(pen, (MARGIN, 468), part, scale)
    OUT.parent.mkdir(parents=True, exist_ok=True)
    canvas.quantize(96, dither=Image.Dither.NONE).save(OUT, optimize=True)


if __name__ == "__main__":
    main()
