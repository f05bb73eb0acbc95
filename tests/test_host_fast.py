"""The host backends' fast paths: reduced decoding changes pixels within bounds and never geometry; costs are told."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

import fastdata
from fastdata.errors import UsageError
from fastdata.geometry import Geometry, choose_reductions, reduced_windows
from fastdata.shards.convert import convert_folder
from fastdata.shards.options import ConvertOptions

TRAIN = (fastdata.RandomResizedCrop(24), fastdata.RandomHorizontalFlip())
OPTIONS = {"pil": fastdata.HostOptions, "webdataset": fastdata.WebDatasetOptions}


def waves(height: int, width: int) -> NDArray[np.uint8]:
    """Slopes of up to 5 grey levels a pixel in both directions, so that a picture moved by one pixel shows."""
    y, x = np.mgrid[:height, :width]
    planes = [128 + 100 * np.sin(2 * np.pi * (x * a + y * b) / 120) for a, b in ((1, 0), (0, 1), (0.7, 0.7))]
    return np.stack(planes, axis=2).round().astype(np.uint8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Large pictures of odd sizes in every orientation and the usual samplings."""
    root = tmp_path_factory.mktemp("large") / "pictures"
    for number in range(16):
        exif = Image.Exif()
        exif[0x0112] = number % 8 + 1
        path = root / "ab"[number % 2] / f"{number:02d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        picture = Image.fromarray(waves(301 + 7 * number, 517 - 9 * number))
        picture.save(path, quality=95, subsampling=number // 8 * 2, exif=exif, progressive=number == 5)
    return root


@pytest.fixture(scope="module")
def shards(folder: Path) -> dict[str, Path]:
    found = {}
    for stored in ("original", "crop-ready"):
        found[stored] = folder.parent / stored
        convert_folder(folder, found[stored], ConvertOptions(crop_ready=stored == "crop-ready"))
    return found


def load(data: Path, backend: str, decode: str = "exact", transform: tuple[object, ...] = TRAIN) -> torch.Tensor:
    options = OPTIONS[backend](decode=decode)
    with fastdata.open_pipeline(
        data, backend=backend, transform=transform, batch_size=16, dtype="uint8", shuffle=False, workers=1,
        options=options,
    ) as loader:  # fmt: skip
        return torch.cat([batch.images for batch in loader]).float()


@pytest.mark.parametrize("backend", ["pil", "webdataset"])
def test_fast_decoding_keeps_the_window_in_every_orientation(
    backend: str, folder: Path, shards: dict[str, Path]
) -> None:
    data = folder if backend == "pil" else shards["original"]
    difference = (load(data, backend, "fast") - load(data, backend)).abs().mean(dim=(1, 2, 3))
    assert 0 < difference.max() < 1.7
    assert (difference > 0).sum() >= 12  # nearly all windows are large enough to be reduced


def test_a_picture_moved_by_one_pixel_would_be_noticed() -> None:
    picture = waves(300, 400).astype(int)
    assert np.abs(picture[:, 1:] - picture[:, :-1]).mean() > 1.8


def test_fast_decoding_of_crop_ready_files_equals_that_of_whole_ones(shards: dict[str, Path]) -> None:
    whole, cut = (load(shards[stored], "webdataset", "fast") for stored in ("original", "crop-ready"))
    torch.testing.assert_close(cut, whole, rtol=0, atol=0)


@pytest.mark.parametrize("backend", ["pil", "webdataset"])
def test_fast_decoding_leaves_windows_that_hardly_shrink_alone(backend: str, shards: dict[str, Path]) -> None:
    transform = (fastdata.RandomResizedCrop(256),)
    fast, exact = (load(shards["original"], backend, decode, transform) for decode in ("fast", "exact"))
    assert torch.equal(fast, exact)


def test_fast_decoding_of_an_evaluation_recipe_keeps_the_window(shards: dict[str, Path]) -> None:
    transform = (fastdata.Resize(40), fastdata.CenterCrop(32))
    difference = load(shards["crop-ready"], "webdataset", "fast", transform) - load(
        shards["crop-ready"], "webdataset", "exact", transform
    )
    assert 0 < difference.abs().mean(dim=(1, 2, 3)).max() < 1.7


def test_torchvision_refuses_fast_decoding_by_name(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"HostOptions\.decode.*torchvision"):
        fastdata.open_pipeline(
            folder, backend="torchvision", transform=TRAIN, batch_size=4, options=fastdata.HostOptions(decode="fast")
        )


def test_an_unknown_way_to_decode_is_refused() -> None:
    with pytest.raises(UsageError, match=r"WebDatasetOptions\.decode"):
        fastdata.WebDatasetOptions(decode="faster")  # type: ignore[arg-type]


sides = st.integers(1, 3000)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(sides, sides, sides, sides), min_size=1, max_size=4))
def test_a_reduced_window_is_the_smallest_that_is_not_below_the_output(cases: list[tuple[int, int, int, int]]) -> None:
    values = np.array(cases)
    shape, full = values[:, :2], values[:, 2:]
    low = np.zeros_like(shape)
    chosen = choose_reductions(Geometry(low, low + shape, full, low, (1, 1), np.zeros(len(cases), np.bool_)))
    for reduction, window, output in zip(chosen.tolist(), shape, full, strict=True):
        assert reduction in (1, 2, 4, 8)
        assert reduction == 1 or (window >= reduction * output).all()
        assert reduction == 8 or (window < 2 * reduction * output).any()


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 90), st.integers(1, 99), st.sampled_from([1, 2, 4, 8]))
def test_reduced_windows_are_whole_pixels_that_hold_the_window(low: int, size: int, reduction: int) -> None:
    side = -(-(low + size + 3) // reduction) * reduction
    (top, left, height, width), *_ = reduced_windows(
        np.array([[low, low, size, size]]), np.array([[side, side]]), np.array([reduction])
    ).tolist()
    assert (top, height) == (left, width)
    assert 0 <= top <= low
    assert low + size <= top + height <= side
    assert top % reduction == height % reduction == 0 or reduction == 1
    if reduction == 1:
        assert (top, height) == (low, size)


def test_reports_tell_how_long_the_interpreter_was_held(shards: dict[str, Path]) -> None:
    with fastdata.open_pipeline(
        shards["crop-ready"], backend="webdataset", transform=TRAIN, batch_size=8, workers=2
    ) as loader:
        list(loader)
        details = loader.report().details
    assert 0 < details["python_s"] < details["load_s"]
    assert 0 < details["read_s"] < details["load_s"]
    assert details["python_us_per_image"] == pytest.approx(details["python_s"] / 16 * 1e6)
