"""Odd, damaged and hostile pictures through every backend: one outcome for all, and never a wrong one.

The numbers in docstrings are those of public failures of other loaders; each backend reads the same small folder, the
webdataset backend from shards of it.
"""

from __future__ import annotations

import importlib.util
import resource
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import fastdata
from fastdata.errors import SampleError
from fastdata.shards.convert import convert_folder
from fastdata.shards.options import ConvertOptions
from tests import pictures
from tests.shard_files import write_tar

BACKENDS = [
    "pil",
    "torchvision",
    "webdataset",
    pytest.param(
        "dali",
        marks=pytest.mark.skipif(
            importlib.util.find_spec("nvidia") is None or importlib.util.find_spec("nvidia.dali") is None,
            reason="DALI is not installed",
        ),
    ),
]
SMALL_AS_STORED = (fastdata.Resize((48, 64)),)


@dataclass(frozen=True)
class Loaded:
    """What an epoch without shuffling gave."""

    images: dict[str, NDArray[np.uint8]]
    """(H, W, 3) by file name."""
    report: fastdata.Report
    """Of the epoch."""


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., Loaded]:
    """Return a function that reads encoded pictures through one backend."""

    def run(backend: str, files: dict[str, bytes], transform: Any = SMALL_AS_STORED, **arguments: Any) -> Loaded:
        folder = tmp_path / "folder" / "ant"
        if not folder.exists():
            folder.mkdir(parents=True)
            for name, data in files.items():
                (folder / name).write_bytes(data)
        data: Path = folder.parent
        if backend == "webdataset":
            data = tmp_path / "shards"
            if not data.exists():
                members = [
                    (f"{number:09d}.{part}", content)
                    for number, name in enumerate(sorted(files))
                    for part, content in (("jpg", files[name]), ("cls", b"0"))
                ]
                write_tar(data / "shard-000000.tar", members)
        given = {"dtype": "uint8", "batch_size": 4, "workers": 1, "shuffle": False} | arguments
        with fastdata.open_pipeline(data, backend=backend, transform=transform, **given) as loader:
            batches = list(loader)
            names = sorted(files)
            images = {
                names[i]: image.permute(1, 2, 0).cpu().numpy()
                for batch in batches
                for i, image in zip(batch.ids.tolist(), batch.images, strict=True)
            }
            return Loaded(images, loader.report())

    return run


def _is(image: NDArray[np.uint8], color: tuple[int, int, int], tolerance: int = 3) -> bool:
    return bool((np.abs(image.astype(int) - color) <= tolerance).all())


@pytest.mark.parametrize("backend", BACKENDS)
def test_odd_formats_and_colors_come_out_right(backend: str, load: Callable[..., Loaded]) -> None:
    """B01, B03, B05, B07, B08, B13, B14."""
    expected: dict[str, tuple[bytes, tuple[int, int, int], int]] = {
        "png.JPEG": (pictures.flat((10, 200, 30), kind="PNG"), (10, 200, 30), 0),
        "webp.jpg": (pictures.flat((10, 200, 30), kind="WEBP", lossless=True), (10, 200, 30), 0),
        "cmyk.jpg": (pictures.cmyk(), (255, 0, 0), 3),
        "cmyk-dark.jpg": (pictures.cmyk((0, 255, 255, 64)), (191, 0, 0), 3),
        "cmyk-without-adobe.jpg": (pictures.cmyk(adobe=False), (255, 0, 0), 3),
        "gray.jpg": (pictures.gray(77), (77, 77, 77), 1),
        "gray-16.png": (pictures.gray_16_bit(32768), (128, 128, 128), 1),
        "gray-16-dark.png": (pictures.gray_16_bit(100), (0, 0, 0), 1),
        "hidden.JPEG": (pictures.hidden_red(), (255, 0, 0), 0),
        "plain.jpg": (pictures.flat((124, 116, 104)), (124, 116, 104), 2),
    }
    found = load(backend, {name: data for name, (data, _, _) in expected.items()})
    for name, (_, color, tolerance) in expected.items():
        assert _is(found.images[name], color, tolerance), (name, found.images[name][0, 0])
    if backend != "pil":
        assert sum(found.report.fallbacks.values()) >= 8


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_first_of_two_pictures_counts(backend: str, load: Callable[..., Loaded]) -> None:
    """B13: a camera's MPO is its first picture."""
    found = load(backend, {"two.JPG": pictures.two_pictures(), "smooth.jpg": pictures.smooth(64, 48)})
    assert found.images["two.JPG"].std() > 10


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_legal_jpeg_flavours_decode_alike(backend: str, load: Callable[..., Loaded]) -> None:
    """B11: mixed in one batch."""
    flavours = {f"{s}.jpg": pictures.sampled(s) for s in ("444", "422", "420", "440", "411")}
    flavours |= {
        "baseline.jpg": pictures.smooth(200, 150, quality=95, subsampling=2),
        "progressive.jpg": pictures.smooth(200, 150, quality=95, subsampling=2, progressive=True),
        "optimised.jpg": pictures.smooth(200, 150, quality=95, subsampling=2, optimize=True),
        "restarts.jpg": pictures.smooth(200, 150, quality=95, subsampling=2, restart_marker_blocks=1),
    }
    found = load(backend, flavours, batch_size=9).images
    for name in flavours:
        difference = np.abs(found[name].astype(int) - found["444.jpg"].astype(int)).mean()
        assert difference < 3, (name, difference)
    for name in ("progressive.jpg", "optimised.jpg", "restarts.jpg"):
        assert np.array_equal(found[name], found["baseline.jpg"]), name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("orientation", ["apply", "ignore"])
def test_orientation_is_one_switch(backend: str, orientation: str, load: Callable[..., Loaded]) -> None:
    """B27: quadrants red, green / blue, white in all eight EXIF orientations."""
    files = {f"{n}.jpg": pictures.oriented(n) for n in range(1, 9)}
    found = load(backend, files, (fastdata.Resize((64, 64)),), orientation=orientation).images
    colors = {"R": (255, 0, 0), "G": (0, 255, 0), "B": (0, 0, 255), "W": (255, 255, 255)}
    upright = {1: "RGBW", 2: "GRWB", 3: "WBGR", 4: "BWRG", 5: "RBGW", 6: "BRWG", 7: "WGBR", 8: "GWRB"}
    for number in range(1, 9):
        image = found[f"{number}.jpg"]
        quadrants = upright[number] if orientation == "apply" else "RGBW"
        places = ((16, 16), (16, 48), (48, 16), (48, 48))
        for letter, (y, x) in zip(quadrants, places, strict=True):
            assert _is(image[y, x], colors[letter], 12), (number, letter, image[y, x])


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_decoder_takes_these_and_each_is_named(backend: str, load: Callable[..., Loaded]) -> None:
    """B09, B15, B17, B21: cut, empty, text, 12-bit, lossless and absurdly large files are skipped and counted."""
    bad = {
        "a-empty.jpg": b"",
        "b-page.jpg": b"<html>404</html>",
        "c-marker.jpg": b"\xff\xd8",
        "d-twelve.jpg": pictures.twelve_bit(),
        "e-lossless.jpg": pictures.lossless(),
        "f-huge.jpg": pictures.claiming(),
        "g-half.jpg": pictures.cut(0.5),
        "h-most.jpg": pictures.cut(0.9),
        "i-half-progressive.jpg": pictures.cut(0.5, progressive=True),
    }
    good = {f"z{n}.jpg": pictures.flat((n * 40, 100, 50)) for n in range(5)}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = load(backend, bad | good, on_error="skip")
    assert sorted(found.images) == sorted(good)
    assert len(found.report.skipped) == len(bad)
    for place, skipped in zip(sorted(bad), found.report.skipped, strict=True):
        assert (place in skipped.where) or (f"{skipped.sample_id:09d}" in skipped.where)
        assert skipped.reason
    for number in range(5):
        assert _is(found.images[f"z{number}.jpg"], (number * 40, 100, 50), 3)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1_000_000  # KiB


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_message_names_the_one_bad_file(backend: str, load: Callable[..., Loaded]) -> None:
    """B24."""
    files = {f"{n:02d}.jpg": pictures.flat((n, 0, 0)) for n in range(20)}
    files["13.jpg"] = b"<html>404</html>"
    with pytest.raises(SampleError, match=r"13\.jpg|000000013") as caught:
        load(backend, files, shuffle=True)
    assert caught.value.sample_id == 13


@pytest.mark.parametrize("backend", BACKENDS)
def test_damage_inside_a_scan_leaves_its_neighbours_alone(backend: str, load: Callable[..., Loaded]) -> None:
    """B18: bytes overwritten in the middle of a scan; all backends give Pillow's pixels."""
    files = {f"{n}.jpg": pictures.noise(seed=n) for n in range(8)}
    healthy = {name: data for name, data in files.items() if name != "3.jpg"}
    files["3.jpg"] = pictures.scan_of_zeros()
    found = load(backend, files, (fastdata.Resize((256, 256)),), batch_size=8).images
    reference = load("pil", files, (fastdata.Resize((256, 256)),), batch_size=8).images
    for name in healthy:
        assert np.abs(found[name].astype(int) - reference[name]).mean() <= (0.3 if backend == "dali" else 0)
    assert found["3.jpg"].shape == (256, 256, 3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_junk_around_the_end_marker_does_not_matter(backend: str, load: Callable[..., Loaded]) -> None:
    """B20."""
    good = pictures.smooth(200, 150)
    files = {f"{name.replace(' ', '-')}.jpg": change(good) for name, change in pictures.JUNK.items()} | {
        "good.jpg": good
    }
    found = load(backend, files).images
    for name in files:
        assert np.array_equal(found[name], found["good.jpg"]), name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("transform", [fastdata.imagenet_train(224), fastdata.imagenet_eval(224)])
def test_tiny_and_extreme_shapes_fill_the_output(backend: str, transform: Any, load: Callable[..., Loaded]) -> None:
    """B29, B30."""
    ramp = np.repeat((np.arange(1000) * 255 // 999).astype(np.uint8)[None, :, None], 3, axis=2)
    files = {
        "one.jpg": pictures.flat((10, 200, 30), (1, 1)),
        "eight.jpg": pictures.flat((10, 200, 30), (8, 8)),
        "flat.jpg": pictures.flat((10, 200, 30), (17, 3)),
        "hundred.jpg": pictures.flat((10, 200, 30), (100, 80)),
        "wide.png": pictures.encode(pictures.Image.fromarray(ramp), "PNG"),
        "tall.png": pictures.encode(pictures.Image.fromarray(ramp.transpose(1, 0, 2)), "PNG"),
    }
    found = load(backend, files, transform).images
    assert all(image.shape == (224, 224, 3) for image in found.values())
    for name in ("one.jpg", "eight.jpg", "flat.jpg", "hundred.jpg"):
        assert _is(found[name], (10, 200, 30), 3), name
    if transform == fastdata.imagenet_train(224):
        for name in ("wide.png", "tall.png"):
            assert _is(found[name], (127, 127, 127), 4), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_shrinking_is_antialiased(backend: str, load: Callable[..., Loaded]) -> None:
    """B33: stripes of 2 in 8 columns, shrunk eightfold, become an even gray of a quarter."""
    stripes = np.zeros((512, 512, 3), np.uint8)
    stripes[:, np.isin(np.arange(512) % 8, (3, 4))] = 255
    data = pictures.encode(pictures.Image.fromarray(stripes), "JPEG", quality=100, subsampling=0)
    image = load(backend, {"stripes.jpg": data}, (fastdata.Resize((64, 64)),)).images["stripes.jpg"]
    assert _is(image[4:-4, 4:-4], (64, 64, 64), 4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_crops_keep_the_asked_aspect(backend: str, load: Callable[..., Loaded]) -> None:
    """B32: the box is read back from corner colours."""
    y, x = np.mgrid[:400, :400]
    picture = np.stack([x // 2, y // 2, np.zeros_like(x)], axis=2).astype(np.uint8)
    files = {f"{n:03d}.png": pictures.encode(pictures.Image.fromarray(picture), "PNG") for n in range(40)}
    crop = (fastdata.RandomResizedCrop(32, scale=(0.2, 0.5), ratio=(0.75, 0.75)),)
    for image in load(backend, files, crop).images.values():
        pixels = image.astype(float)
        width = pixels[16, -1, 0] - pixels[16, 0, 0]
        height = pixels[-1, 16, 1] - pixels[0, 16, 1]
        assert abs(width / height - 0.75) <= 0.05


def test_bad_files_are_left_out_and_labels_stay_with_their_pictures(tmp_path: Path) -> None:
    """B25: every tenth of 100 files is empty; the rest keep their labels, in every backend on the folder."""
    files = pictures.tree(tmp_path / "tree", 25)
    for path in files[::10]:
        path.write_bytes(b"")
    for backend in ("pil", "torchvision"):
        with fastdata.open_pipeline(
            tmp_path / "tree", backend=backend, transform=SMALL_AS_STORED, batch_size=8, dtype="uint8",
            on_error="skip", shuffle=False, workers=2,
        ) as loader:  # fmt: skip
            seen = [
                (pictures.number_of(image.permute(1, 2, 0).numpy()), int(label))
                for images, labels in loader
                for image, label in zip(images, labels, strict=True)
            ]
            report = loader.report()
        assert len(seen) == report.delivered == 90
        assert len(report.skipped) == 10
        assert all(number // 25 == label for number, label in seen)


def test_pinning_keeps_types_and_layout(tmp_path: Path) -> None:
    """B39, as far as a machine without a GPU goes: the same types, dtypes and strides in the first batch and later."""
    pictures.tree(tmp_path / "tree", 4)
    for memory_format in ("channels_last", "contiguous"):
        with fastdata.open_pipeline(
            tmp_path / "tree", backend="torchvision", transform=fastdata.imagenet_eval(32), batch_size=4,
            memory_format=memory_format, workers=1,
        ) as loader:  # fmt: skip
            strides = {batch.images.stride() for batch in loader}
        assert len(strides) == 1


def test_classes_stay_mixed_in_every_part_of_an_epoch(tmp_path: Path) -> None:
    """B96: the first ten batches of a class-sorted folder hold all classes."""
    pictures.tree(tmp_path / "tree", 60)
    with fastdata.open_pipeline(
        tmp_path / "tree", backend="torchvision", transform=SMALL_AS_STORED, batch_size=8, dtype="uint8"
    ) as loader:
        labels = torch.cat([batch.labels for _, batch in zip(range(10), loader, strict=False)])
    assert set(labels.tolist()) == {0, 1, 2, 3}


def test_converting_refuses_what_the_loaders_refuse(tmp_path: Path) -> None:
    """B17: an empty file stops the converter with its path."""
    files = pictures.tree(tmp_path / "tree", 2)
    files[3].write_bytes(b"")
    with pytest.raises(fastdata.FastDataError, match=files[3].name):
        convert_folder(tmp_path / "tree", tmp_path / "shards", ConvertOptions())
