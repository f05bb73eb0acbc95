"""The resize: equal to Pillow's bit for bit, on any part of the picture that holds what the filter reads."""

from __future__ import annotations

import threading

import numpy as np
import PIL
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from fastdata.errors import UsageError
from fastdata.resample import Axis, read_range, read_ranges, resample_into

Picture = NDArray[np.uint8]
pillow_13 = int(PIL.__version__.split(".", maxsplit=1)[0]) >= 13


def noise(height: int, width: int, seed: int = 0) -> Picture:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def pillow_pass(picture: Picture, height: int, width: int) -> Picture:
    """Resize one axis (or none) with Pillow; every version gives the same."""
    return np.asarray(Image.fromarray(picture).resize((width, height), Image.Resampling.BILINEAR))


def pillow_resize(picture: Picture, height: int, width: int) -> Picture:
    """Resize with Pillow in the order of passes that Pillow 13 takes, whatever version is installed."""
    fewer_rows = picture.shape[0] - height
    if fewer_rows > 0 and fewer_rows > 2 * (picture.shape[1] - width):
        return pillow_pass(pillow_pass(picture, height, picture.shape[1]), height, width)
    return pillow_pass(pillow_pass(picture, picture.shape[0], width), height, width)


def resample(picture: Picture, rows: Axis, columns: Axis, *, flip: bool = False) -> Picture:
    """Resize from exactly the pixels that the filter reads, cut out of `picture`."""
    (top, bottom), (left, right) = read_range(rows), read_range(columns)
    out = np.empty((rows.size, columns.size, 3), np.uint8)
    resample_into(picture[top:bottom, left:right].copy(), (top, left), rows, columns, out, flip=flip)
    return out


sides = st.integers(1, 300)


@st.composite
def train_crops(draw: st.DrawFn) -> tuple[int, int, Axis, Axis]:
    """A picture's height and width, and a window of it resized whole."""
    spans = []
    for _ in range(2):
        side = draw(sides)
        low = draw(st.integers(0, side - 1))
        size = draw(sides)
        spans.append((side, Axis(low, draw(st.integers(low + 1, side)), size, 0, size)))
    return spans[0][0], spans[1][0], spans[0][1], spans[1][1]


@st.composite
def eval_crops(draw: st.DrawFn) -> tuple[int, int, Axis, Axis]:
    """A picture's height and width, and a part of the whole picture resized."""
    spans = []
    for _ in range(2):
        side, full = draw(sides), draw(sides)
        first = draw(st.integers(0, full - 1))
        spans.append((side, Axis(0, side, full, first, draw(st.integers(1, full - first)))))
    return spans[0][0], spans[1][0], spans[0][1], spans[1][1]


@settings(max_examples=400, deadline=None)
@given(train_crops(), st.booleans(), st.integers(0, 2**32 - 1))
def test_a_resized_window_equals_pillows_crop_then_resize(
    case: tuple[int, int, Axis, Axis], flip: bool, seed: int
) -> None:
    height, width, rows, columns = case
    picture = noise(height, width, seed)
    expected = pillow_resize(picture[rows.low : rows.high, columns.low : columns.high], rows.full, columns.full)
    result = resample(picture, rows, columns, flip=flip)
    np.testing.assert_array_equal(result, expected[:, ::-1] if flip else expected)


@settings(max_examples=400, deadline=None)
@given(eval_crops(), st.booleans(), st.integers(0, 2**32 - 1))
def test_a_part_of_a_resize_equals_pillows_resize_then_crop(
    case: tuple[int, int, Axis, Axis], flip: bool, seed: int
) -> None:
    height, width, rows, columns = case
    picture = noise(height, width, seed)
    whole = pillow_resize(picture, rows.full, columns.full)
    expected = whole[rows.first : rows.first + rows.size, columns.first : columns.first + columns.size]
    result = resample(picture, rows, columns, flip=flip)
    np.testing.assert_array_equal(result, expected[:, ::-1] if flip else expected)


@pytest.mark.skipif(not pillow_13, reason="Pillow before 13 always filters along the rows first")
@settings(max_examples=300, deadline=None)
@given(sides, sides, sides, sides, st.integers(0, 2**32 - 1))
def test_the_order_of_passes_is_pillows(height: int, width: int, out_height: int, out_width: int, seed: int) -> None:
    picture = noise(height, width, seed)
    result = resample(picture, Axis(0, height, out_height, 0, out_height), Axis(0, width, out_width, 0, out_width))
    np.testing.assert_array_equal(result, pillow_pass(picture, out_height, out_width))


@pytest.mark.skipif(not pillow_13, reason="Pillow before 13 always filters along the rows first")
@pytest.mark.parametrize("fewer_columns", [1, 20, 40])
@pytest.mark.parametrize("beyond", [-1, 0, 1])
def test_the_order_of_passes_turns_where_pillow_turns_it(fewer_columns: int, beyond: int) -> None:
    height, width = 31 + 2 * fewer_columns + beyond, 60
    picture = noise(height, width)
    rows, columns = Axis(0, height, 31, 0, 31), Axis(0, width, width - fewer_columns, 0, width - fewer_columns)
    np.testing.assert_array_equal(resample(picture, rows, columns), pillow_pass(picture, 31, width - fewer_columns))


@pytest.mark.parametrize(("height", "width"), [(224, 224), (2000, 3), (3, 2000), (1, 1), (1500, 1200)])
def test_extreme_and_equal_shapes_equal_pillow(height: int, width: int) -> None:
    """B29, B30: pictures down to one pixel, or one pixel thin, come out at full size."""
    picture = noise(height, width)
    result = resample(picture, Axis(0, height, 224, 0, 224), Axis(0, width, 224, 0, 224))
    np.testing.assert_array_equal(result, pillow_resize(picture, 224, 224))


def test_a_resize_to_the_same_size_copies() -> None:
    picture = noise(224, 224)
    axis = Axis(0, 224, 224, 0, 224)
    np.testing.assert_array_equal(resample(picture, axis, axis), picture)


def test_thousands_of_weights_stay_within_a_byte() -> None:
    white = np.full((40_000, 2, 3), 255, np.uint8)
    result = resample(white, Axis(0, 40_000, 1, 0, 1), Axis(0, 2, 2, 0, 2))
    np.testing.assert_array_equal(result, pillow_resize(white, 1, 2))


def test_downscaling_is_antialiased() -> None:
    """B33: columns with x % 8 in {3, 4} white shrink to their mean of 64, not to 255."""
    picture = np.zeros((512, 512, 3), np.uint8)
    picture[:, np.isin(np.arange(512) % 8, (3, 4))] = 255
    axis = Axis(0, 512, 64, 0, 64)
    inner = resample(picture, axis, axis)[8:-8, 8:-8]
    assert np.abs(inner.astype(int) - 64).max() <= 4


def test_pixels_outside_the_read_range_do_not_matter() -> None:
    picture = noise(300, 280)
    rows, columns = Axis(0, 300, 256, 16, 224), Axis(0, 280, 239, 7, 224)
    expected = resample(picture, rows, columns)
    (top, bottom), (left, right) = read_range(rows), read_range(columns)
    assert (top, bottom, left, right) != (0, 300, 0, 280)
    for altered in (np.s_[:top], np.s_[bottom:], np.s_[:, :left], np.s_[:, right:]):
        picture[altered] ^= 255
    out = np.empty_like(expected)
    resample_into(picture, (0, 0), rows, columns, out)
    np.testing.assert_array_equal(out, expected)


def test_rows_may_lie_apart_and_memory_around_the_slot_stays() -> None:
    wide = noise(90, 200)
    batch = np.full((3, 50, 61, 3), 7, np.uint8)
    rows, columns = Axis(0, 90, 50, 0, 50), Axis(20, 150, 61, 0, 61)
    resample_into(wide[:, 20:150], (0, 20), rows, columns, batch[1])
    np.testing.assert_array_equal(batch[1], pillow_resize(wide[:, 20:150], 50, 61))
    assert (batch[[0, 2]] == 7).all()


@settings(max_examples=300, deadline=None)
@given(st.lists(eval_crops(), min_size=1, max_size=4))
def test_ranges_of_many_axes_are_those_of_each(cases: list[tuple[int, int, Axis, Axis]]) -> None:
    axes = [axis for case in cases for axis in case[2:]]
    fields = {name: np.array([getattr(a, name) for a in axes]) for name in ("low", "high", "full", "first", "size")}
    begin, end = read_ranges(**fields)
    assert list(zip(begin.tolist(), end.tolist(), strict=True)) == [read_range(axis) for axis in axes]


def test_threads_do_not_share_work_memory() -> None:
    pictures = [noise(150 + 40 * i, 170, i) for i in range(4)]
    axes = [(Axis(0, p.shape[0], 100, 0, 100), Axis(0, 170, 90, 0, 90)) for p in pictures]
    expected = [resample(p, *a) for p, a in zip(pictures, axes, strict=True)]
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(200):
            if not np.array_equal(resample(pictures[number], *axes[number]), expected[number]):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize(
    "fields", [(0, 0, 5, 0, 5), (-1, 4, 5, 0, 5), (0, 4, 5, 3, 3), (0, 4, 5, 0, 0), (0, 4, 5, -1, 2)]
)
def test_an_impossible_axis_is_refused(fields: tuple[int, int, int, int, int]) -> None:
    with pytest.raises(UsageError, match="low < high"):
        Axis(*fields)


def test_a_picture_without_the_pixels_that_are_read_is_refused() -> None:
    axis = Axis(0, 40, 20, 0, 20)
    out = np.empty((20, 20, 3), np.uint8)
    with pytest.raises(UsageError, match="at least rows 0:40, columns 0:40"):
        resample_into(noise(39, 40), (0, 0), axis, axis, out)
    with pytest.raises(UsageError, match="rows 1:41"):
        resample_into(noise(40, 40), (1, 0), axis, axis, out)


@pytest.mark.parametrize(
    "out",
    [np.empty((20, 21, 3), np.uint8), np.empty((20, 20, 3), np.int8), np.empty((20, 40, 3), np.uint8)[:, ::2]],
    ids=["shape", "dtype", "layout"],
)
def test_a_slot_of_another_shape_or_layout_is_refused(out: Picture) -> None:
    axis = Axis(0, 40, 20, 0, 20)
    with pytest.raises(UsageError):
        resample_into(noise(40, 40), (0, 0), axis, axis, out)
