"""Makes a set of photo files to measure loaders on: class folders of JPEGs, cut from photographs with clear rights.

``python tools/demo_photos.py OUT`` writes 1,600 files (about 145 MB) in ten classes, always the same ones for one
version of Pillow and NumPy. The photographs come with scikit-image, so nothing is fetched. Each file is a window of its
class's photograph at a size, quality, chroma subsampling and sometimes orientation of its own; the shares follow what
photo collections hold: mostly baseline 4:2:0, a few progressive, few gray, few turned by EXIF.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image
from rich.progress import track

SEED = 20_241_105
EXIF_ORIENTATION = 0x0112


@dataclass(frozen=True)
class Photo:
    """A photograph that scikit-image ships, and what allows its use."""

    file: str
    """Name below scikit-image's `data` folder."""
    files_made: int
    """Windows cut from it; the gray ones have few, as gray files are few in photo collections."""
    rights: str
    """Who made it and the terms, as scikit-image's documentation of the picture says."""


PHOTOS = {
    "astronaut": Photo("astronaut.png", 256, "NASA, public domain"),
    "cat": Photo("chelsea.png", 256, "Stefan van der Walt, CC0"),
    "coffee": Photo("coffee.png", 256, "Rachel Michetti, CC0"),
    "galaxies": Photo("hubble_deep_field.jpg", 256, "NASA, public domain"),
    "retina": Photo("retina.jpg", 256, "Mikael Häggström, CC0"),
    "rocket": Photo("rocket.jpg", 256, "SpaceX, public domain"),
    "brick": Photo("brick.png", 16, "CC0 Textures, CC0"),
    "cameraman": Photo("camera.png", 16, "Lav Varshney, CC0"),
    "grass": Photo("grass.png", 16, "linolafett, CC0"),
    "gravel": Photo("gravel.png", 16, "CC0 Textures, CC0"),
}


@dataclass(frozen=True)
class Cut:
    """How one file is made from its photograph."""

    box: tuple[float, float, float, float]
    """Window in the photograph: left, upper, right, lower, in pixels."""
    size: tuple[int, int]
    """(width, height) of the file, in pixels."""
    grain: float
    """Standard deviation of the noise laid over it, in grey levels: enlarged photographs lack the detail, and so the
    bytes, of a camera's."""
    quality: int
    """JPEG quality of libjpeg, 80 to 96."""
    subsampling: str
    """Chroma subsampling: 4:2:0, 4:2:2 or 4:4:4."""
    progressive: bool
    orientation: int
    """EXIF orientation; 1 is as stored, 6 is turned by 90 degrees."""
    noise_seed: int


def draw_cut(rng: np.random.Generator, photo_size: tuple[int, int]) -> Cut:
    """Draw a window of at least a third of the photograph, and how it is stored."""
    aspect = float(np.exp(rng.uniform(np.log(2 / 3), np.log(3 / 2))))
    long_side = round(float(rng.choice([320, 400, 500, 640, 1024, 1600], p=[0.05, 0.1, 0.6, 0.15, 0.07, 0.03])))
    size = (long_side, round(long_side / aspect)) if aspect >= 1 else (round(long_side * aspect), long_side)
    scale = min(photo_size[0] / size[0], photo_size[1] / size[1]) * float(rng.uniform(0.6, 1.0))
    width, height = size[0] * scale, size[1] * scale
    left, upper = rng.uniform(0, photo_size[0] - width), rng.uniform(0, photo_size[1] - height)
    return Cut(
        box=(left, upper, left + width, upper + height),
        size=size,
        grain=float(rng.uniform(2, 7)),
        quality=int(rng.integers(80, 97)),
        subsampling=str(rng.choice(["4:2:0", "4:2:2", "4:4:4"], p=[0.8, 0.08, 0.12])),
        progressive=bool(rng.random() < 0.05),
        orientation=6 if rng.random() < 0.02 else 1,
        noise_seed=int(rng.integers(2**32)),
    )


def write_cut(photo: Image.Image, cut: Cut, path: Path) -> None:
    """Cut, enlarge or reduce, lay grain over it, and store it as JPEG."""
    window = np.asarray(photo.resize(cut.size, Image.Resampling.LANCZOS, box=cut.box), dtype=np.float32)
    grain = np.random.default_rng(cut.noise_seed).standard_normal(window.shape[:2], dtype=np.float32) * cut.grain
    pixels = window + (grain[..., None] if window.ndim == 3 else grain)
    picture = Image.fromarray(pixels.clip(0, 255).round().astype(np.uint8))
    exif = Image.Exif()
    if cut.orientation != 1:
        exif[EXIF_ORIENTATION] = cut.orientation
    chroma = {"subsampling": cut.subsampling} if photo.mode == "RGB" else {}
    picture.save(path, "JPEG", quality=cut.quality, progressive=cut.progressive, exif=exif, **chroma)


def shipped_photos() -> Path:
    """Return the folder of the photographs that the scikit-image package ships."""
    import skimage

    return Path(skimage.__file__).parent / "data"


def make_photo_set(out: Path) -> int:
    """Write the set and return its number of files; a set that is there already stays as it is.

    It is written beside `out` and renamed, so a folder with that name is always a whole set.
    """
    if out.exists():
        return sum(1 for path in out.glob("*/*.jpg"))
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    jobs: list[tuple[Image.Image, Cut, Path]] = []
    for number, (name, shipped) in enumerate(PHOTOS.items()):
        (partial / name).mkdir(parents=True)
        with Image.open(shipped_photos() / shipped.file) as opened:
            photo = opened.convert("L" if opened.mode == "L" else "RGB")
        rng = np.random.default_rng([SEED, number])
        jobs += [
            (photo, draw_cut(rng, photo.size), partial / name / f"{index:04d}.jpg")
            for index in range(shipped.files_made)
        ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in track(pool.map(lambda job: write_cut(*job), jobs), "Making photos", total=len(jobs)):
            pass
    partial.rename(out)
    return len(jobs)


def main() -> None:
    """Read the command line and make the set."""
    parser = argparse.ArgumentParser(description="Make a set of photo files from photographs with clear rights.")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to make; left alone if it exists")
    out = parser.parse_args().out
    count = make_photo_set(out)
    print(f"{count} photos in {out}")
    for name, photo in PHOTOS.items():
        print(f"    {name}: {photo.file} of scikit-image ({photo.rights})")


if __name__ == "__main__":
    sys.exit(main())
