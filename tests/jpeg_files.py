"""Pictures and JPEG files that tests make for themselves."""

from __future__ import annotations

import io
from collections.abc import Iterator

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image

SAMPLINGS = ("444", "420", "422", "440", "411", "gray")


def pixels(width: int, height: int, seed: int = 0) -> NDArray[np.uint8]:
    """Return (height, width, 3) of smooth colour with edges and some noise, like a photograph."""
    rng = np.random.default_rng((seed, width, height))
    y, x = np.mgrid[0:height, 0:width]
    waves = [np.sin(x * rng.uniform(0.02, 0.4) + y * rng.uniform(0.02, 0.4) + c) for c in range(3)]
    picture = 128 + 70 * np.stack(waves, -1) + rng.normal(0, rng.choice([1, 12]), (height, width, 3))
    picture[height // 3 : height // 2 + 1, width // 4 : width // 2 + 1] = rng.integers(0, 256, 3)
    return picture.clip(0, 255).astype(np.uint8)


def baseline(width: int, height: int, sampling: str = "420", quality: int = 85, seed: int = 0) -> bytes:
    """Encode `pixels` as a baseline file of one scan, with libjpeg-turbo."""
    picture = pixels(width, height, seed)
    if sampling == "gray":
        return simplejpeg.encode_jpeg(np.ascontiguousarray(picture[..., :1]), quality, "GRAY", "gray")
    return simplejpeg.encode_jpeg(picture, quality, "RGB", sampling)


def with_pillow(width: int, height: int, mode: str = "RGB", seed: int = 0, **options: object) -> bytes:
    """Encode `pixels` with Pillow's options."""
    target = io.BytesIO()
    Image.fromarray(pixels(width, height, seed)).convert(mode).save(target, "JPEG", **options)
    return target.getvalue()


def decoded(data: bytes) -> NDArray[np.uint8]:
    """Decode with Pillow, without a change of orientation or colour."""
    with Image.open(io.BytesIO(data)) as picture:
        return np.asarray(picture)


def spoiled_copies(data: bytes, start: int) -> Iterator[bytes]:
    """Yield 150 copies of a file with up to three other bytes between `start` and its end marker."""
    rng = np.random.default_rng(1)
    for _ in range(150):
        copy = bytearray(data)
        for at in rng.integers(start, len(data) - 2, 3):
            copy[at] = int(rng.integers(0, 256))
        yield bytes(copy)
