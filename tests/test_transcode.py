"""Claims about `fastdata.transcode`: crop-ready files hold the same picture; what cannot be kept exactly stays."""

from __future__ import annotations

import io
import struct
import warnings

import numpy as np
import pytest
import simplejpeg
from PIL import Image

from fastdata import jpeg, jpeg_encode, jpeg_segments, transcode
from fastdata.errors import UsageError
from tests.jpeg_files import SAMPLINGS, baseline, decoded, spoiled_copies, with_pillow


def crop_ready(data: bytes, **options: object) -> bytes:
    result = transcode.make_crop_ready(data, **{"max_growth": 9.0, **options})
    assert result.reason == ""
    assert result.data is not None
    return result.data


def reason(data: bytes, **options: object) -> str:
    result = transcode.make_crop_ready(data, **{"max_growth": 9.0, **options})
    assert (result.data is None) == bool(result.reason)
    return result.reason


def spectral_scans(data: bytes) -> bytes:
    """Rewrite a baseline file of one scan as one of a scan for each component."""
    picture = read(data)
    order = np.repeat(picture.pattern[None], picture.mcus_across * picture.mcus_down, 0).reshape(-1)
    starts = np.cumsum(picture.counts) - picture.counts
    head = data[: data.index(b"\xff\xc4")]
    codes, scans = np.zeros((4, 256), np.int64), b""
    for component, (_, stride, across, down, blocks_across, blocks_down) in enumerate(picture.grids.tolist()):
        mine = np.flatnonzero(order == component).reshape(picture.mcus_down, picture.mcus_across, down, across)
        raster = mine.transpose(0, 2, 1, 3).reshape(-1, stride)[:blocks_down, :blocks_across].reshape(-1)
        dc, counts = picture.dc[raster], picture.counts[raster]
        tokens = np.concatenate([picture.tokens[starts[b] : starts[b] + picture.counts[b]] for b in raster])
        frequencies, pattern, blocks = np.zeros((4, 256), np.int64), np.zeros(1, np.int64), len(raster)
        assert jpeg_encode.count_differences(pattern, blocks, blocks, dc, frequencies[:2])
        frequencies[2] = np.bincount(tokens >> 16, minlength=256)
        codes, huffman = transcode._best_codes(frequencies)
        out, lengths = np.empty(len(data) + 4096, np.uint8), np.empty(1, np.int64)
        size = jpeg_encode.encode_scan(pattern, blocks, blocks, dc, counts, tokens, codes, out, lengths)
        sos = bytes([1, picture.frame[6 + 3 * component], 0, 0, 63, 0])
        scans += transcode._segment(0xC4, huffman) + transcode._segment(0xDA, sos) + out[:size].tobytes()
    return head + scans + b"\xff\xd9"


def read(data: bytes) -> transcode.Picture:
    return transcode.read_picture(np.frombuffer(data, np.uint8), jpeg.read_header(data))


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("size", [(1, 1), (8, 8), (9, 17), (33, 31), (140, 97), (16, 140)])
def test_baseline_files_keep_their_pixels(size: tuple[int, int], sampling: str) -> None:
    data = baseline(*size, sampling)
    np.testing.assert_array_equal(decoded(crop_ready(data)), decoded(data))


@pytest.mark.parametrize("subsampling", ["4:4:4", "4:2:2", "4:2:0"])
@pytest.mark.parametrize("quality", [20, 75, 100])
@pytest.mark.parametrize("size", [(5, 3), (64, 64), (139, 91)])
def test_progressive_files_become_baseline_and_keep_their_pixels(
    size: tuple[int, int], quality: int, subsampling: str
) -> None:
    data = with_pillow(*size, progressive=True, quality=quality, subsampling=subsampling)
    ready = crop_ready(data)
    assert jpeg.read_header(data).process == 2
    assert jpeg.read_header(ready).process == 0
    np.testing.assert_array_equal(decoded(ready), decoded(data))


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "L", "progressive": True},
        {"progressive": True, "restart_marker_blocks": 3},
        {"progressive": True, "restart_marker_rows": 1},
        {"restart_marker_blocks": 5},
        {"restart_marker_rows": 2, "optimize": True},
        {"quality": 1, "mode": "L"},
    ],
)
def test_restarts_gray_and_low_quality_keep_their_pixels(options: dict[str, object]) -> None:
    data = with_pillow(130, 77, **options)
    np.testing.assert_array_equal(decoded(crop_ready(data)), decoded(data))


@pytest.mark.parametrize("sampling", SAMPLINGS[:-1])
@pytest.mark.parametrize("size", [(7, 9), (70, 45), (129, 65)])
def test_files_of_one_scan_a_component_keep_their_pixels(size: tuple[int, int], sampling: str) -> None:
    data = spectral_scans(baseline(*size, sampling))
    assert jpeg.read_header(data).scan_components == 1
    np.testing.assert_array_equal(decoded(data), decoded(baseline(*size, sampling)))
    np.testing.assert_array_equal(decoded(crop_ready(data)), decoded(data))


def test_wide_quantisation_tables_are_kept() -> None:
    table = [(400 + i) for i in range(64)]
    data = with_pillow(65, 40, qtables=[table, table], subsampling="4:2:0")
    ready = crop_ready(data)
    assert jpeg.read_header(ready).process == 1
    np.testing.assert_array_equal(decoded(ready), decoded(data))


@pytest.mark.parametrize("interval", [1, 2, 3, 4, 6, 12])
def test_every_divisor_of_the_columns_is_an_interval(interval: int) -> None:
    data = baseline(96, 50, "444")
    ready = crop_ready(data, restart_interval=interval)
    assert jpeg.read_header(ready).restart_interval == interval
    np.testing.assert_array_equal(decoded(ready), decoded(data))
    np.testing.assert_array_equal(simplejpeg.decode_jpeg(ready), simplejpeg.decode_jpeg(data))


@pytest.mark.parametrize("interval", [0, 5, 24])
def test_an_interval_that_would_straddle_rows_is_refused(interval: int) -> None:
    with pytest.raises(UsageError, match="restart_interval"):
        transcode.make_crop_ready(baseline(96, 50, "444"), restart_interval=interval)


def test_an_unknown_check_is_refused() -> None:
    with pytest.raises(UsageError, match="coefficients"):
        transcode.make_crop_ready(baseline(96, 50), check="some")  # type: ignore[arg-type]


def test_orientation_and_adobe_segment_stay_and_other_metadata_go() -> None:
    tags = Image.Exif()
    tags[0x0112], tags[0x010E] = 6, "a long description " * 50
    data = with_pillow(64, 48, exif=tags, icc_profile=bytes(3000), comment=b"text", dpi=(72, 72))
    data = data[:2] + transcode._segment(0xEE, b"Adobe\0\x64\0\0\0\0\1 and more") + data[2:]
    ready = crop_ready(data)
    header = jpeg.read_header(ready)
    assert (header.orientation, header.adobe, header.jfif) == (6, 1, jpeg.read_header(data).jfif)
    assert (b"long description" in ready, b"ICC_PROFILE" in ready, b"text" in ready) == (False, False, False)
    with Image.open(io.BytesIO(ready)) as picture:
        assert picture.getexif()[0x0112] == 6


def test_the_same_file_gives_the_same_bytes_and_transcoding_twice_changes_nothing() -> None:
    data = with_pillow(140, 100, progressive=True)
    ready = crop_ready(data)
    assert crop_ready(data) == ready
    assert crop_ready(ready, restart_interval=jpeg.read_header(ready).restart_interval) == ready


def test_growth_beyond_the_limit_leaves_the_file_alone() -> None:
    data = crop_ready(baseline(256, 256, "444", 10), restart_interval=32)
    assert reason(data, max_growth=0.02, restart_interval=1) == transcode.GROWS
    assert reason(data, max_growth=-0.5) == transcode.GROWS


def test_a_coarser_interval_is_taken_where_the_best_one_grows_too_much() -> None:
    data = baseline(512, 256, "444", 60)
    best = transcode.restart_intervals(jpeg.read_header(data))[0]
    free = crop_ready(data)
    tight = crop_ready(data, max_growth=(len(free) - 1) / len(data) - 1)
    assert jpeg.read_header(free).restart_interval == best
    assert jpeg.read_header(tight).restart_interval > best
    assert len(tight) < len(free)


def test_pictures_after_the_first_and_junk_are_dropped() -> None:
    data = baseline(64, 48)
    assert crop_ready(data + data) == crop_ready(data) == crop_ready(data + bytes(100))


@pytest.mark.parametrize("make", [baseline, lambda w, h: with_pillow(w, h, progressive=True)])
def test_files_cut_short_are_left_alone(make: object) -> None:
    data = make(100, 80)  # type: ignore[operator]
    start = jpeg.read_header(data).scan_offset
    for length in np.linspace(start, len(data) - 3, 25).astype(int).tolist():
        assert reason(data[:length] + b"\xff\xd9") in {"damaged scan", "incomplete progressive scans"}
        assert reason(data[:length]) == "no end-of-image marker"


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"restart_marker_blocks": 2}])
def test_damage_is_either_named_or_reads_like_a_decoder_reads_it(options: dict[str, object]) -> None:
    data = with_pillow(96, 80, **options)
    named = 0
    for damaged in spoiled_copies(data, jpeg.read_header(data).scan_offset):
        result = transcode.make_crop_ready(damaged, max_growth=9.0)
        named += result.data is None
        if result.data is not None:
            np.testing.assert_array_equal(decoded(result.data), decoded(damaged))
    assert named > 75


def test_incomplete_progressive_files_are_left_alone_because_decoders_smooth_them() -> None:
    data = with_pillow(96, 80, progressive=True)
    last = data.rindex(b"\xff\xda")
    assert reason(data[:last] + b"\xff\xd9") == "incomplete progressive scans"


def test_hostile_headers_never_stop_the_transcoder() -> None:
    rng = np.random.default_rng(2)
    reasons = set()
    for source in (with_pillow(70, 50, progressive=True), baseline(70, 50)):
        start = jpeg.read_header(source).scan_offset
        for _ in range(400):
            spoiled = bytearray(source)
            for at in rng.integers(2, start, rng.integers(1, 4)):
                spoiled[at] = int(rng.choice([0, 1, 2, 0x11, 0x3F, 0x80, 0xFF, rng.integers(0, 256)]))
            if 0 < jpeg.read_header(bytes(spoiled)).width < 1000 and jpeg.read_header(bytes(spoiled)).height < 1000:
                reasons.add(transcode.make_crop_ready(bytes(spoiled), check="none").reason)
    assert {"damaged scan", "unusual scans or tables"} <= reasons


def test_what_a_decoder_refuses_though_no_pixel_needs_it_is_left_alone() -> None:
    file = with_pillow(32, 32)
    tables = file.index(b"\xff\xc4")
    last_symbol = tables + 21 + sum(file[tables + 5 : tables + 21]) - 1
    impossible_symbol = file[:last_symbol] + bytes([200]) + file[last_symbol + 1 :]  # of the first DC table
    unknown_marker = file[:2] + b"\xff\xf2\x00\x04ab" + file[2:]
    for damaged in (impossible_symbol, unknown_marker):
        with pytest.raises(OSError, match="broken data stream"), Image.open(io.BytesIO(damaged)) as picture:
            picture.load()
        assert transcode.make_crop_ready(damaged, max_growth=9).reason == "unusual scans or tables"


def test_what_fast_decoders_refuse_is_left_alone_for_that_reason() -> None:
    data = baseline(64, 48)
    sof = jpeg.read_header(data).sof_offset
    assert reason(with_pillow(64, 48, "CMYK")) == "not 1 or 3 components"
    assert reason(data[: sof + 1] + b"\xcb" + data[sof + 2 :]) == "lossless or hierarchical coding"
    assert reason(b"<html>") == "not a JPEG"
    assert reason(b"") == "not a JPEG"


@pytest.mark.parametrize("check", transcode.CHECKS)
def test_every_check_accepts_what_is_right(check: transcode.Check) -> None:
    data = baseline(100, 75)
    assert crop_ready(data, check=check) == crop_ready(data)


@pytest.mark.parametrize("check", ["coefficients", "pixels"])
def test_checks_notice_a_file_that_differs(check: transcode.Check, monkeypatch: pytest.MonkeyPatch) -> None:
    data, other = baseline(100, 75, quality=90), baseline(100, 75, quality=91)
    monkeypatch.setattr(transcode, "_write_first_that_fits", lambda *_: crop_ready_of_other)
    crop_ready_of_other = transcode._write(read(other), 1, 10**6)
    assert reason(data, check=check) == transcode.DIFFERS
    assert reason(data, check="none") == ""


def test_long_segments_use_the_escape_and_many_segments_use_several_parts() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 2048, 3)).astype(np.uint8)
    data = simplejpeg.encode_jpeg(noise, 95, "RGB", "420")
    ready = crop_ready(data, restart_interval=128)
    header = jpeg.read_header(ready)
    assert header.table_end - header.table_offset == 16 + 5 * 4
    lengths = np.array([254, 255, 70_000, 1] + [7] * 140_000)
    parts = jpeg_segments.table_segments(lengths)
    assert parts.count(jpeg.TABLE_SIGNATURE) == 3
    first = struct.unpack(">H", parts[2:4])[0]
    assert parts[16:31] == bytes([254, 255, 0, 0, 0, 255, 255, 0, 1, 0x11, 0x70, 1, 7, 7, 7])
    assert (first, parts[14], parts[15]) == (65_535, 0, 3)


def test_huffman_codes_stay_within_16_bits_and_leave_the_all_ones_code_free() -> None:
    for frequencies in ([1], [5, 5], [2**i for i in range(40)], [1] * 256, np.random.default_rng(0).zipf(1.3, 200)):
        padded = np.zeros(256, np.int64)
        padded[: len(frequencies)] = np.minimum(frequencies, 2**40)
        counts, symbols = np.zeros(16, np.uint8), np.zeros(256, np.uint8)
        used = jpeg_encode.code_lengths(padded, counts, symbols)
        lengths = np.repeat(np.arange(1, 17), counts)
        assert used == len(lengths) == np.count_nonzero(padded)
        assert sorted(symbols[:used]) == np.flatnonzero(padded).tolist()
        assert (2.0**-lengths).sum() <= 1 - 2.0**-16


@pytest.mark.parametrize("sampling", ["444", "420", "gray"])
def test_other_decoders_take_the_result(sampling: str) -> None:
    torch, decoders = pytest.importorskip("torch"), pytest.importorskip("torchvision.io")
    data = baseline(97, 55, sampling)
    ready = crop_ready(data)
    with warnings.catch_warnings(action="ignore"):  # torchvision announces the end of its decoders
        picture = decoders.decode_jpeg(torch.frombuffer(bytearray(ready), dtype=torch.uint8)).numpy()
    np.testing.assert_array_equal(picture.transpose(1, 2, 0).squeeze(), decoded(data))
    space = "gray" if sampling == "gray" else "rgb"
    np.testing.assert_array_equal(simplejpeg.decode_jpeg(ready, space).squeeze(), decoded(data))
