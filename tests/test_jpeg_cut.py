"""Claims about `fastdata.jpeg_cut`: a cut decodes to the pixels of the full decode; what does not fit stays whole."""

from __future__ import annotations

import numpy as np
import pytest
import simplejpeg
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from fastdata import jpeg, jpeg_cut, transcode
from tests.jpeg_files import SAMPLINGS, baseline, decoded, with_pillow


def crop_ready(data: bytes, interval: int | None = None) -> bytes:
    result = transcode.make_crop_ready(data, max_growth=9.0, restart_interval=interval)
    assert result.data is not None, result.reason
    return result.data


def fast(data: bytes) -> NDArray[np.uint8]:
    space = "gray" if jpeg.read_header(data).components == 1 else "rgb"
    return simplejpeg.decode_jpeg(data, space).squeeze(-1) if space == "gray" else simplejpeg.decode_jpeg(data, space)


def assert_exact(ready: bytes, full: NDArray[np.uint8], window: tuple[int, int, int, int]) -> jpeg_cut.Cut:
    """Check that the window's pixels in the cut are those of the full picture, for two decoders."""
    top, left, height, width = window
    small, where = jpeg_cut.cut(ready, window)
    assert jpeg_cut.OUTCOMES[where.outcome] == "cut"
    assert len(small) == where.bytes <= len(ready)
    for picture in (decoded(bytes(small)), fast(bytes(small))):
        assert picture.shape[:2] == (where.height, where.width)
        part = picture[top - where.top :, left - where.left :][:height, :width]
        np.testing.assert_array_equal(part, full[top : top + height, left : left + width])
    return where


def random_window(rng: np.random.Generator, height: int, width: int) -> tuple[int, int, int, int]:
    """Return a window that often touches an edge or is a few pixels small."""
    spans = []
    for size in (height, width):
        length = int(rng.integers(1, min(size, 5) + 1) if rng.random() < 0.3 else rng.integers(1, size + 1))
        start = int(rng.integers(0, size - length + 1))
        spans.append((rng.choice([0, size - length, start]).item(), length))
    return spans[0][0], spans[1][0], spans[0][1], spans[1][1]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_cuts_of_small_pictures_are_exact_at_every_size(sampling: str) -> None:
    rng = np.random.default_rng(SAMPLINGS.index(sampling))
    for _ in range(120):
        width, height = (int(rng.integers(1, 141)) for _ in range(2))
        ready = crop_ready(baseline(width, height, sampling, int(rng.integers(30, 98))))
        full = decoded(ready)
        for _ in range(6):
            assert_exact(ready, full, random_window(rng, height, width))


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_cuts_are_exact_at_every_interval(sampling: str) -> None:
    rng = np.random.default_rng(7)
    data = baseline(379, 133, sampling)  # 48 or 24 or 12 MCU columns, the last one partial
    full = decoded(data)
    columns = -(-379 // jpeg.read_header(data).mcu_width)
    for interval in [d for d in range(1, columns + 1) if columns % d == 0]:
        ready = crop_ready(data, interval)
        for _ in range(12):
            assert_exact(ready, full, random_window(rng, 133, 379))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_cuts_of_any_window_are_exact(draw: st.DataObject) -> None:
    width, height = draw.draw(st.integers(1, 70), "width"), draw.draw(st.integers(1, 70), "height")
    sampling = draw.draw(st.sampled_from(SAMPLINGS), "sampling")
    top, left = draw.draw(st.integers(0, height - 1), "top"), draw.draw(st.integers(0, width - 1), "left")
    window = top, left, draw.draw(st.integers(1, height - top)), draw.draw(st.integers(1, width - left))
    ready = crop_ready(baseline(width, height, sampling), draw.draw(st.sampled_from([None, 1])))
    assert_exact(ready, decoded(ready), window)


def test_last_columns_of_four_pixels_and_less_are_exact() -> None:
    for width in range(33, 38):
        for sampling in ("420", "422"):
            ready = crop_ready(baseline(width, 40, sampling), 1)
            full = decoded(ready)
            for left in range(30, width):
                assert_exact(ready, full, (20, left, 9, width - left))


def test_wide_quantisation_tables_and_progressive_sources_are_exact() -> None:
    rng = np.random.default_rng(3)
    table = [(400 + i) for i in range(64)]
    for data in (
        with_pillow(200, 150, qtables=[table, table], subsampling="4:2:0"),
        with_pillow(200, 150, progressive=True, subsampling="4:2:2"),
    ):
        ready, full = crop_ready(data), decoded(data)
        for _ in range(20):
            assert_exact(ready, full, random_window(rng, 150, 200))


def test_a_cut_is_no_larger_than_the_margins_need() -> None:
    ready = crop_ready(baseline(320, 320, "420"), 1)
    full = decoded(ready)
    where = assert_exact(ready, full, (33, 65, 14, 14))
    assert (where.top, where.left, where.height, where.width) == (32, 64, 16, 16)
    where = assert_exact(ready, full, (32, 64, 16, 16))
    assert (where.top, where.left, where.height, where.width) == (16, 48, 48, 48)
    plain = crop_ready(baseline(320, 320, "444"), 1)
    where = assert_exact(plain, decoded(plain), (32, 64, 16, 16))
    assert (where.top, where.left, where.height, where.width) == (32, 64, 16, 16)


def test_cuts_carry_no_segment_table_and_keep_their_orientation() -> None:
    tags = Image.Exif()
    tags[0x0112] = 8
    ready = crop_ready(with_pillow(200, 150, exif=tags))
    small, _ = jpeg_cut.cut(ready, (10, 10, 50, 50))
    header = jpeg.read_header(small)
    assert (header.crop_ready, header.orientation, header.refusal) == (False, 8, jpeg.TAKEN)


def test_a_batch_holds_the_same_cuts_and_its_padding_is_zero() -> None:
    rng = np.random.default_rng(5)
    sizes = [(150, 90), (64, 64), (1, 1), (97, 33)]
    originals = [baseline(*size, sampling) for size in sizes for sampling in SAMPLINGS]
    data = [crop_ready(one) for one in originals] + originals[:2] + [b"no picture"]
    headers = [jpeg.read_header(one) for one in data]
    windows = [random_window(rng, max(h.height, 1), max(h.width, 1)) for h in headers]
    files = jpeg_cut.locate_files([memoryview(one) for one in data])
    plans = jpeg_cut.plan_cuts(files, np.array(windows))
    longest = int(plans["bytes"].max())
    out = np.full((len(data), longest), 7, np.uint8)
    jpeg_cut.write_cuts(files, plans, out.reshape(-1), np.arange(len(data)) * longest, longest)
    pieces, again = jpeg_cut.cut_all(files, np.array(windows))
    np.testing.assert_array_equal(again, plans)
    for i, (one, window) in enumerate(zip(data, windows, strict=True)):
        small, where = jpeg_cut.cut(one, window)
        assert jpeg_cut.Cut(*plans[i].tolist()) == where
        assert out[i, : where.bytes].tobytes() == bytes(small) == bytes(pieces[i])
        assert not out[i, where.bytes :].any()
    assert plans["outcome"].tolist() == [jpeg_cut.CUT] * len(sizes) * len(SAMPLINGS) + [jpeg_cut.NOT_READY] * 3
    assert pieces[-3:] == list(files.buffers[-3:])
    decoded(out[0].tobytes())


def test_an_empty_batch_gives_nothing() -> None:
    files, windows = jpeg_cut.locate_files([]), np.empty((0, 4), np.int64)
    assert jpeg_cut.cut_all(files, windows)[0] == []
    plans = jpeg_cut.plan_cuts(files, windows)
    assert plans.shape == (0,)
    jpeg_cut.write_cuts(files, plans, np.empty(0, np.uint8), np.empty(0, np.int64))


def test_cuts_can_be_packed_or_padded_in_a_buffer_that_is_used_again() -> None:
    files = jpeg_cut.locate_files([crop_ready(baseline(100, 80)), crop_ready(baseline(50, 60))])
    plans = jpeg_cut.plan_cuts(files, np.array([(0, 0, 20, 20), (30, 30, 5, 9)]))
    first, second = plans["bytes"].tolist()
    packed = np.full(first + second, 77, np.uint8)
    jpeg_cut.write_cuts(files, plans, packed, np.array([0, first]))
    padded = np.full(2 * (first + 100), 77, np.uint8)
    jpeg_cut.write_cuts(files, plans, padded, np.array([0, first + 100]), first + 100)
    np.testing.assert_array_equal(packed[:first], padded[:first])
    np.testing.assert_array_equal(packed[first:], padded[first + 100 :][:second])
    assert not padded[first : first + 100].any()
    assert not padded[first + 100 + second :].any()


def test_buffers_that_are_too_small_are_refused() -> None:
    files = jpeg_cut.locate_files([crop_ready(baseline(100, 80))] * 2)
    plans = jpeg_cut.plan_cuts(files, np.array([(0, 0, 20, 20)] * 2))
    size = int(plans["bytes"].sum())
    for room, starts in ((size - 1, [0, size // 2]), (size, [0, size // 2 - 1]), (size, [-1, size // 2])):
        with pytest.raises(ValueError, match="starts"):
            jpeg_cut.write_cuts(files, plans, np.empty(room, np.uint8), np.array(starts))
    with pytest.raises(ValueError, match="out"):
        jpeg_cut.write_cuts(files, plans, np.empty((2, size), np.uint8), np.array([0, size]))
    with pytest.raises(ValueError, match="out"):
        jpeg_cut.cut(files.buffers[0], (0, 0, 5, 5), np.empty(50, np.uint8))
    with pytest.raises(ValueError, match="out"):
        jpeg_cut.cut_all(files, np.array([(0, 0, 20, 20)] * 2), np.empty(int(files.lengths.sum()) - 1, np.uint8))


def test_a_window_outside_of_the_picture_is_cut_at_its_edge_and_an_empty_one_leaves_it_whole() -> None:
    ready = crop_ready(baseline(320, 240, "444"), 1)
    _, where = jpeg_cut.cut(ready, (-50, 300, 66, 99))
    assert (where.top, where.left, where.height, where.width) == (0, 296, 16, 24)
    for window in ((240, 0, 5, 5), (0, 0, 0, 5), (0, -9, 5, 9), (10**12, 0, 5, 5), (0, 0, 5, -(10**12))):
        assert jpeg_cut.cut(ready, window)[0] is ready


def test_files_without_a_table_are_handed_on_as_they_are() -> None:
    for data in (baseline(64, 48), with_pillow(64, 48, restart_marker_blocks=1), b"", b"text"):
        small, where = jpeg_cut.cut(data, (3, 3, 5, 5))
        assert small is data
        assert (where.outcome, where.bytes, where.top, where.left) == (jpeg_cut.NOT_READY, len(data), 0, 0)


def test_a_table_of_another_scan_is_noticed() -> None:
    one, other = crop_ready(baseline(160, 96, seed=1), 1), crop_ready(baseline(160, 96, seed=2), 1)
    mixed = one[: jpeg.read_header(one).table_end] + other[jpeg.read_header(other).table_end :]
    assert jpeg_cut.cut(mixed, (40, 40, 20, 20))[1].outcome == jpeg_cut.BAD_TABLE
    swapped = bytearray(one)
    at = jpeg.read_header(one).table_offset + 16 + 33  # the sum stays, the markers around the window do not fit
    swapped[at], swapped[at + 1] = swapped[at] + 1, swapped[at + 1] - 1
    assert jpeg_cut.cut(bytes(swapped), (52, 52, 4, 4))[1].outcome == jpeg_cut.BAD_TABLE


def test_a_file_cut_short_stays_whole() -> None:
    ready = crop_ready(baseline(160, 96), 1)
    for length in range(len(ready)):
        assert jpeg_cut.cut(ready[:length], (0, 0, 8, 8))[1].outcome != jpeg_cut.CUT
    assert jpeg_cut.cut(ready[:-1000] + b"\xff\xd9", (0, 0, 8, 8))[1].outcome == jpeg_cut.BAD_TABLE


def test_hostile_tables_and_headers_never_give_a_wrong_read() -> None:
    rng = np.random.default_rng(4)
    ready = crop_ready(baseline(160, 96, "420"), 1)
    header = jpeg.read_header(ready)
    outcomes = []
    for _ in range(3000):
        spoiled = bytearray(ready)
        end = header.table_end if rng.random() < 0.5 else header.scan_offset
        for at in rng.integers(2, end, rng.integers(1, 4)):
            spoiled[at] = int(rng.choice([0, 1, 255, rng.integers(0, 256)]))
        out = np.full(len(spoiled) + 64, 99, np.uint8)
        small, where = jpeg_cut.cut(spoiled, (40, 40, 20, 20), out[: len(spoiled)])
        outcomes.append(where.outcome)
        assert where.bytes == len(small) <= len(spoiled)
        assert (out[len(spoiled) :] == 99).all()
    assert set(outcomes) == {jpeg_cut.CUT, jpeg_cut.NOT_READY, jpeg_cut.BAD_TABLE}


def test_tables_of_several_parts_and_long_lengths_are_read() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 2048, 3)).astype(np.uint8)
    ready = crop_ready(simplejpeg.encode_jpeg(noise, 95, "RGB", "420"), 16)
    assert_exact(ready, decoded(ready), (30, 700, 20, 400))
    wide = crop_ready(simplejpeg.encode_jpeg(np.full((2048, 2304, 3), 90, np.uint8), 50, "RGB", "444"), 1)
    header = jpeg.read_header(wide)
    assert header.table_end - header.table_offset > 65_537
    assert_exact(wide, decoded(wide), (2000, 2200, 40, 100))
    missing = wide[: header.table_offset] + wide[header.table_offset + 65_537 :]
    assert jpeg_cut.cut(missing, (0, 0, 9, 9))[1].outcome == jpeg_cut.BAD_TABLE


def test_a_cut_of_the_whole_picture_is_the_whole_picture() -> None:
    ready = crop_ready(baseline(100, 75))
    where = assert_exact(ready, decoded(ready), (0, 0, 75, 100))
    assert (where.top, where.left, where.height, where.width) == (0, 0, 75, 100)
