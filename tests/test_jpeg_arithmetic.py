"""Claims about arithmetic-coded JPEGs: made crop-ready they hold the same picture, and damage is never made worse."""

from __future__ import annotations

import shutil
import subprocess

import numpy as np
import pytest
import simplejpeg

from fastdata import jpeg, jpeg_arithmetic, transcode
from fastdata.decode import decode_reference
from tests.arithmetic_files import Coder, Conditioning, Scan, arithmetic, progressive_scans
from tests.jpeg_files import SAMPLINGS, baseline, decoded, spoiled_copies, with_pillow


def crop_ready(data: bytes, **options: object) -> bytes:
    result = transcode.make_crop_ready(data, **{"max_growth": 9.0, **options})
    assert result.reason == ""
    assert result.data is not None
    assert jpeg.read_header(result.data).process == 0
    return result.data


def reason(data: bytes) -> str:
    return transcode.make_crop_ready(data, max_growth=9.0).reason


@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("size", [(1, 1), (9, 17), (70, 45)])
def test_arithmetic_files_become_baseline_and_keep_their_pixels(
    size: tuple[int, int], sampling: str, progressive: bool
) -> None:
    source = baseline(*size, sampling)
    data = arithmetic(source, progressive=progressive)
    assert jpeg.read_header(data).process == (10 if progressive else 9)
    np.testing.assert_array_equal(decoded(data), decoded(source))
    np.testing.assert_array_equal(decoded(crop_ready(data)), decoded(source))


@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("restart_interval", [1, 3, 7])
def test_restarts_reset_statistics_and_predictions(restart_interval: int, progressive: bool) -> None:
    source = baseline(90, 61, "420")
    data = arithmetic(source, progressive=progressive, restart_interval=restart_interval)
    np.testing.assert_array_equal(decoded(data), decoded(source))
    np.testing.assert_array_equal(decoded(crop_ready(data)), decoded(source))


@pytest.mark.parametrize("conditioning", [Conditioning(0, 0, 1), Conditioning(2, 4, 20), Conditioning(5, 15, 63)])
def test_conditioning_is_that_of_the_file(conditioning: Conditioning) -> None:
    source = baseline(64, 48, "444", quality=97)
    data = arithmetic(source, conditioning=conditioning)
    assert len(data) != len(arithmetic(source))
    np.testing.assert_array_equal(decoded(data), decoded(source))
    np.testing.assert_array_equal(decoded(crop_ready(data)), decoded(source))


@pytest.mark.parametrize("quality", [3, 50, 100])
def test_small_and_large_coefficients_keep_their_pixels(quality: int) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (48, 64, 3)).astype(np.uint8)
    source = simplejpeg.encode_jpeg(noise, quality, "RGB", "444")
    for data in (arithmetic(source), arithmetic(source, progressive=True)):
        np.testing.assert_array_equal(decoded(data), decoded(source))
        np.testing.assert_array_equal(decoded(crop_ready(data)), decoded(source))


def test_scans_of_single_components_keep_their_pixels() -> None:
    source = baseline(75, 50, "420")
    data = arithmetic(source, scans=[Scan((0,)), Scan((1,)), Scan((2,))], restart_interval=4)
    np.testing.assert_array_equal(decoded(data), decoded(source))
    np.testing.assert_array_equal(decoded(crop_ready(data)), decoded(source))


def test_blank_pictures_end_in_many_zeros_that_are_left_out() -> None:
    source = simplejpeg.encode_jpeg(np.full((256, 256, 3), 130, np.uint8), 90, "RGB", "444")
    for data in (arithmetic(source), arithmetic(source, progressive=True)):
        np.testing.assert_array_equal(decoded(crop_ready(data)), decoded(source))


def test_every_estimate_of_the_table_decodes_as_pillow_decodes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # The encoder takes its estimates from the decoder, so Pillow judges them, on files that need all 114.
    seen, put = set(), Coder.put

    def noting(coder: Coder, context: int, decision: bool | int) -> None:
        seen.add(coder._indices.get(context, 0) >> 1)
        put(coder, context, decision)

    monkeypatch.setattr(Coder, "put", noting)
    for seed, quality, sampling in ((0, 30, "444"), (1, 90, "444"), (2, 100, "420")):
        source = baseline(200, 150, sampling, quality, seed)
        for options in ({}, {"progressive": True}, {"restart_interval": 5}):
            data = arithmetic(source, **options)
            np.testing.assert_array_equal(decoded(data), decoded(source))
            np.testing.assert_array_equal(decoded(crop_ready(data)), decoded(source))
    assert seen == set(range(len(jpeg_arithmetic.ESTIMATES) // 2))


@pytest.mark.skipif(shutil.which("jpegtran") is None, reason="jpegtran is not installed")
@pytest.mark.parametrize(
    "options", [["-arithmetic"], ["-arithmetic", "-progressive"], ["-arithmetic", "-restart", "1"]]
)
@pytest.mark.parametrize("sampling", ["gray", "444", "422", "420"])
def test_files_of_another_encoder_keep_their_pixels(sampling: str, options: list[str]) -> None:
    source = baseline(250, 187, sampling, quality=93)
    data = subprocess.run(["jpegtran", *options], input=source, capture_output=True, check=True).stdout
    assert jpeg.read_header(data).process in (9, 10)
    assert len(data) < len(source)
    np.testing.assert_array_equal(decoded(crop_ready(data)), decoded(source))
    assert crop_ready(data) == crop_ready(source, restart_interval=jpeg.read_header(crop_ready(data)).restart_interval)


@pytest.mark.parametrize("check", transcode.CHECKS)
def test_every_check_takes_arithmetic_files_of_any_size(check: transcode.Check) -> None:
    data = large()
    crop_ready(data, check=check)


def large() -> bytes:
    """Return an arithmetic-coded file beyond the 64 KiB that Pillow reads at a time."""
    noise = np.random.default_rng(0).integers(0, 256, (160, 160, 3)).astype(np.uint8)
    data = arithmetic(simplejpeg.encode_jpeg(noise, 99, "RGB", "444"))
    assert len(data) > 65_536
    return data


def test_the_reference_decodes_arithmetic_files_beyond_one_read() -> None:
    data = large()
    np.testing.assert_array_equal(decode_reference(data), decode_reference(crop_ready(data)))


def test_fast_decoders_leave_arithmetic_files_to_the_reference() -> None:
    header = jpeg.read_header(arithmetic(baseline(32, 32)))
    assert jpeg.REFUSALS[header.refusal] == "arithmetic coding"


@pytest.mark.parametrize("progressive", [False, True])
def test_files_cut_short_read_as_a_decoder_reads_them_or_are_left_alone(progressive: bool) -> None:
    data = arithmetic(with_pillow(96, 80), progressive=progressive)
    reasons = []
    for length in np.linspace(jpeg.read_header(data).scan_offset, len(data) - 3, 40).astype(int).tolist():
        cut = data[:length] + b"\xff\xd9"
        result = transcode.make_crop_ready(cut, max_growth=9.0)
        reasons.append(result.reason)
        if result.data is not None:
            np.testing.assert_array_equal(decoded(result.data), decoded(cut))
    assert set(reasons) <= {"", "damaged scan", "incomplete progressive scans", "unusual scans or tables"}
    assert sum(map(bool, reasons)) > 30


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"restart_interval": 2}])
def test_damage_is_either_named_or_reads_like_a_decoder_reads_it(options: dict[str, object]) -> None:
    data = arithmetic(with_pillow(96, 80), **options)
    named = 0
    for damaged in spoiled_copies(data, jpeg.read_header(data).scan_offset):
        result = transcode.make_crop_ready(damaged, max_growth=9.0)
        named += result.data is None
        if result.data is not None:
            np.testing.assert_array_equal(decoded(result.data), decoded(damaged))
    assert named > 50


def test_bytes_that_no_decision_needs_are_damage() -> None:
    data = arithmetic(baseline(64, 48))
    assert reason(data[:-2] + b"\x01" * 8 + data[-2:]) == "damaged scan"
    assert reason(data[:-2] + b"\0" * 64 + data[-2:]) == "damaged scan"


def test_wrong_restart_markers_are_damage() -> None:
    data = arithmetic(baseline(64, 48), restart_interval=2)
    assert reason(data.replace(b"\xff\xd1", b"\xff\xd2")) == "damaged scan"


@pytest.mark.parametrize("entry", [b"\x00\x01", b"\x10\x00", b"\x10\x40", b"\x20\x10", b"\x04\x10", b"\x00"])
def test_impossible_conditioning_is_unusual(entry: bytes) -> None:
    data = arithmetic(baseline(64, 48))
    sof = jpeg.read_header(data).sof_offset
    segment = b"\xff\xcc" + bytes([0, 2 + len(entry)]) + entry
    assert reason(data[:sof] + segment + data[sof:]) == "unusual scans or tables"


def test_incomplete_progressive_files_are_left_alone() -> None:
    source = baseline(64, 48)
    data = arithmetic(source, progressive=True, scans=progressive_scans(3)[:-1])
    assert reason(data) == "incomplete progressive scans"


def test_hostile_headers_never_stop_the_transcoder() -> None:
    rng, reasons = np.random.default_rng(2), set()
    for source in (arithmetic(baseline(70, 50)), arithmetic(baseline(70, 50), progressive=True, restart_interval=2)):
        start = jpeg.read_header(source).scan_offset
        for _ in range(300):
            spoiled = bytearray(source)
            for at in rng.integers(2, start, rng.integers(1, 4)):
                spoiled[at] = int(rng.choice([0, 1, 2, 0x11, 0x3F, 0x80, 0xFF, rng.integers(0, 256)]))
            header = jpeg.read_header(bytes(spoiled))
            if 0 < header.width < 1000 and header.height < 1000:
                reasons.add(transcode.make_crop_ready(bytes(spoiled), check="none").reason)
    assert {"damaged scan", "unusual scans or tables"} <= reasons
