"""Test pictures, made here: encoded bytes of every flavour, healthy and damaged, that image folders hold."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)
CLASSES = ("ant", "bee", "cat", "dog")

# For each EXIF orientation the colours of the upright picture's quadrants, top row then bottom row, where the stored
# picture is `quadrants()`: red, green / blue, white.
UPRIGHT_QUADRANTS = {
    1: (RED, GREEN, BLUE, WHITE),
    2: (GREEN, RED, WHITE, BLUE),
    3: (WHITE, BLUE, GREEN, RED),
    4: (BLUE, WHITE, RED, GREEN),
    5: (RED, BLUE, GREEN, WHITE),
    6: (BLUE, RED, WHITE, GREEN),
    7: (WHITE, GREEN, BLUE, RED),
    8: (GREEN, WHITE, RED, BLUE),
}


def encode(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    """Return a picture's bytes; JPEGs at quality 95 unless told otherwise."""
    if kind in ("JPEG", "MPO"):
        options.setdefault("quality", 95)
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def flat(color: tuple[int, int, int], size: tuple[int, int] = (64, 48), kind: str = "JPEG", **options: Any) -> bytes:
    """Return a picture of one colour; `size` is (width, height)."""
    return encode(Image.new("RGB", size, color), kind, **options)


def gray(value: int, size: tuple[int, int] = (64, 48), kind: str = "JPEG") -> bytes:
    """Return a one-channel picture of one value."""
    return encode(Image.new("L", size, value), kind)


def numbered_color(number: int) -> tuple[int, int, int]:
    """Return the colour that `number_of` reads back as `number`, 0..255, also after JPEG."""
    return 8 + 16 * (number % 16), 8 + 16 * (number // 16), 128


def number_of(pixels: NDArray[np.uint8]) -> int:
    """Return the number of a `numbered_color` picture from its (h, w, 3) pixels."""
    red, green = (int(pixels[..., channel].mean()) // 16 for channel in (0, 1))
    return red + 16 * green


def tree(root: Path, per_class: int, *, suffix: str = ".JPEG") -> list[Path]:
    """Write ``root/{ant,bee,cat,dog}/0000.JPEG ...``; each picture holds its place in the list that is returned."""
    paths = [root / name / f"{i:04}{suffix}" for name in CLASSES for i in range(per_class)]
    for number, path in enumerate(paths):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(flat(numbered_color(number)))
    return paths


def noise_pixels(width: int = 256, height: int = 256, seed: int = 0) -> NDArray[np.uint8]:
    """Return (height, width, 3) uniform noise."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def noise(width: int = 256, height: int = 256, seed: int = 0, kind: str = "JPEG", **options: Any) -> bytes:
    """Return a picture of noise: the hardest to code, and different everywhere."""
    return encode(Image.fromarray(noise_pixels(width, height, seed)), kind, **options)


def smooth_pixels(width: int = 200, height: int = 150) -> NDArray[np.uint8]:
    """Return (height, width, 3) waves of all colours, smooth enough that chroma subsampling hardly shows."""
    y, x = np.mgrid[0:height, 0:width]
    waves = [127.5 + 120 * np.sin(x / 23 + y / 31 + phase) * np.cos(y / 41 - phase) for phase in (0, 2, 4)]
    return np.stack(waves, axis=2).astype(np.uint8)


def smooth(width: int = 200, height: int = 150, kind: str = "JPEG", **options: Any) -> bytes:
    """Return a smooth colour picture."""
    return encode(Image.fromarray(smooth_pixels(width, height)), kind, **options)


def gray_claiming(subsampling: int, **options: Any) -> bytes:
    """Return a smooth gray JPEG whose one component has the sampling factors of 4:4:4, 4:2:2 or 4:2:0 (0, 1, 2)."""
    data = encode(Image.fromarray(smooth_pixels()).convert("L"), subsampling=subsampling, **options)
    assert data[frame_header(data) + 11] == (0x11, 0x21, 0x22)[subsampling]
    return data


def sampled(subsampling: str, width: int = 200, height: int = 150, quality: int = 95) -> bytes:
    """Return a smooth JPEG of any sampling that Pillow does not write too: "444", "422", "420", "440" or "411"."""
    import simplejpeg

    pixels = smooth_pixels(width, height)
    return bytes(simplejpeg.encode_jpeg(pixels, quality, "RGB", subsampling, fastdct=False))


def broken_exif(data: bytes) -> bytes:
    """Return a JPEG with an EXIF segment in front that breaks off within its first directory."""
    body = b"Exif\0\0II*\0\x08\0\0\0\x20\0\x12\x01"
    return data[:2] + b"\xff\xe1" + (len(body) + 2).to_bytes(2, "big") + body + data[2:]


def quadrants() -> Image.Image:
    """Return the 64 x 48 picture of red, green over blue, white."""
    image = Image.new("RGB", (64, 48))
    for color, corner in zip((RED, GREEN, BLUE, WHITE), ((0, 0), (32, 0), (0, 24), (32, 24)), strict=True):
        image.paste(color, (*corner, corner[0] + 32, corner[1] + 24))
    return image


def oriented(orientation: int, kind: str = "JPEG") -> bytes:
    """Return `quadrants` with an EXIF orientation, 1..8."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encode(quadrants(), kind, exif=exif)


def cmyk(color: tuple[int, int, int, int] = (0, 255, 255, 0), *, adobe: bool = True) -> bytes:
    """Return a CMYK JPEG of one colour, red by default, with or without the Adobe segment."""
    data = encode(Image.new("CMYK", (64, 48), color))
    return data if adobe else without_segment(data, 0xEE)


def gray_16_bit(value: int = 32768) -> bytes:
    """Return a 16-bit gray PNG of one value."""
    return encode(Image.fromarray(np.full((48, 64), value, np.uint16)), "PNG")


def hidden_red() -> bytes:
    """Return a PNG that is transparent all over, with red below."""
    return encode(Image.new("RGBA", (64, 48), (255, 0, 0, 0)), "PNG")


def palette(*, transparency: int | bytes | None = 0) -> bytes:
    """Return a PNG whose left half is (10, 20, 30), palette entry 0, and right half (200, 100, 50), with tRNS."""
    image = Image.new("P", (64, 48), 0)
    image.putpalette([10, 20, 30, 200, 100, 50])
    image.paste(1, (32, 0, 64, 48))
    return encode(image, "PNG", **({} if transparency is None else {"transparency": transparency}))


def two_pictures() -> bytes:
    """Return an MPO file: `smooth`, then a black picture."""
    return encode(Image.fromarray(smooth_pixels()), "MPO", save_all=True, append_images=[Image.new("RGB", (200, 150))])


def frame_header(data: bytes) -> int:
    """Return the offset of a JPEG's FF Cx frame header."""
    at = 2
    while not (0xC0 <= data[at + 1] <= 0xCF and data[at + 1] not in (0xC4, 0xC8, 0xCC)):
        at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return at


def without_segment(data: bytes, marker: int) -> bytes:
    """Return a JPEG without the first segment of that marker, such as 0xEE for Adobe's APP14."""
    at = 2
    while data[at + 1] != marker:
        at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return data[:at] + data[at + 2 + int.from_bytes(data[at + 2 : at + 4], "big") :]


def altered(data: bytes, at: int, new: bytes) -> bytes:
    """Return `data` with the bytes at `at` overwritten."""
    return data[:at] + new + data[at + len(new) :]


def twelve_bit() -> bytes:
    """Return a JPEG whose header claims 12 bits a sample."""
    data = flat(RED)
    return altered(data, frame_header(data) + 4, b"\x0c")


def lossless() -> bytes:
    """Return a JPEG whose header claims the lossless process (SOF3)."""
    data = flat(RED)
    return altered(data, frame_header(data) + 1, b"\xc3")


def claiming(width: int = 65500, height: int = 65500) -> bytes:
    """Return a JPEG of 64 x 48 pixels whose header claims another size."""
    data = flat(RED)
    return altered(data, frame_header(data) + 5, height.to_bytes(2, "big") + width.to_bytes(2, "big"))


def scan_of_zeros() -> bytes:
    """Return a noise JPEG with 64 zero bytes in the middle of its scan: damage that decoders do not notice."""
    data = noise()
    return altered(data, len(data) // 2, bytes(64))


def cut(share: float, **options: Any) -> bytes:
    """Return the first `share` of a noise JPEG's bytes."""
    data = noise(**options)
    return data[: int(len(data) * share)]


JUNK = {
    "zeros after the end": lambda good: good + bytes(1000),
    "a second picture after the end": lambda good: good + good,
    "a junk byte before the end": lambda good: good[:-2] + b"\x7f" + good[-2:],
}
"""Ways to add bytes to a healthy JPEG that leave its pixels as they are."""

NO_PICTURES = {"empty": b"", "a web page": b"<html>404</html>", "a start marker only": b"\xff\xd8"}
"""Files that are named as pictures, but hold none."""
