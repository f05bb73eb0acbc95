"""Decoding: one meaning of every file, the fast decoders equal to the reference, and errors that name the file."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fastdata import decode
from fastdata.decode import (
    PIXEL_LIMIT,
    decode_reference,
    decode_torchvision,
    decode_turbo,
    orient,
    reference_size,
    stored_window,
    stored_windows,
)
from fastdata.errors import BackendUnavailableError, DecodeError
from tests import pictures

FAST = [decode_torchvision, decode_turbo]
ALL = [decode_reference, *FAST]
each_fast = pytest.mark.parametrize("fast", FAST)
each_decoder = pytest.mark.parametrize("decoder", ALL)
Decoder = Callable[[bytes], np.ndarray]

FLAVOURS = {
    "baseline": {},
    "progressive": {"progressive": True},
    "optimised": {"optimize": True},
    "restart markers": {"restart_marker_blocks": 1},
    "restart rows": {"restart_marker_rows": 1},
    "low quality": {"quality": 20},
    "full quality": {"quality": 100},
}


def color_error(pixels: np.ndarray, color: tuple[int, ...]) -> int:
    return int(np.abs(pixels.astype(int) - np.array(color)).max())


@each_fast
@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("subsampling", [0, 1, 2])
@pytest.mark.parametrize("size", [(200, 150), (33, 17), (16, 16), (5, 4), (1, 1)])
def test_fast_decoders_equal_the_reference(
    fast: Decoder, flavour: str, subsampling: int, size: tuple[int, int]
) -> None:
    """B11: every ordinary flavour and sampling gives the reference's pixels."""
    data = pictures.noise(*size, **{"subsampling": subsampling, **FLAVOURS[flavour]})
    pixels = fast(data)
    assert pixels.flags.c_contiguous
    np.testing.assert_array_equal(pixels, decode_reference(data))


@each_fast
@pytest.mark.parametrize("subsampling", ["444", "422", "420", "440", "411"])
@pytest.mark.parametrize("size", [(200, 150), (33, 17), (5, 4), (1, 1)])
def test_rare_samplings_decode_alike(fast: Decoder, subsampling: str, size: tuple[int, int]) -> None:
    """B11: 4:4:0 and 4:1:1 too, and all stay near the picture that was encoded."""
    data = pictures.sampled(subsampling, *size)
    reference = decode_reference(data)
    np.testing.assert_array_equal(fast(data), reference)
    assert np.abs(reference.astype(int) - pictures.smooth_pixels(*size)).mean() < 3


@each_fast
def test_a_jpeg_that_stores_rgb_decodes_alike(fast: Decoder) -> None:
    data = pictures.smooth(keep_rgb=True, subsampling=0)
    np.testing.assert_array_equal(fast(data), decode_reference(data))
    assert np.abs(decode_reference(data).astype(int) - pictures.smooth_pixels()).mean() < 3


@each_decoder
def test_progressive_equals_baseline(decoder: Decoder) -> None:
    """B11."""
    np.testing.assert_array_equal(decoder(pictures.smooth(progressive=True)), decoder(pictures.smooth()))


@each_decoder
@pytest.mark.parametrize("value", [0, 77, 255])
def test_one_channel_becomes_three(decoder: Decoder, value: int) -> None:
    """B07."""
    pixels = decoder(pictures.gray(value))
    assert pixels.shape == (48, 64, 3)
    assert color_error(pixels, (value,) * 3) <= 1


@each_decoder
@pytest.mark.parametrize("wrap", [bytes, memoryview, lambda data: memoryview(bytearray(b"xx" + data))[2:]])
def test_bytes_and_memoryviews_decode_alike(decoder: Decoder, wrap: Callable[[bytes], bytes]) -> None:
    data = pictures.smooth()
    np.testing.assert_array_equal(decoder(wrap(data)), decode_reference(data))


@each_decoder
def test_many_threads_decode_alike(decoder: Decoder) -> None:
    data = [pictures.noise(100 + 30 * i, 90, seed=i) for i in range(4)]
    expected = [decode_reference(d) for d in data]
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(20):
            if not np.array_equal(decoder(data[number]), expected[number]):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_turbo_decodes_into_a_buffer_that_is_large_enough() -> None:
    data = pictures.smooth()
    buffer = np.zeros(200 * 150 * 3 + 5, np.uint8)
    pixels = decode_turbo(data, buffer)
    assert np.shares_memory(pixels, buffer)
    np.testing.assert_array_equal(pixels, decode_reference(data))
    small = np.zeros(200 * 150 * 3 - 1, np.uint8)
    np.testing.assert_array_equal(decode_turbo(data, small), pixels)
    assert not small.any()


def test_a_mislabelled_png_is_read_by_content() -> None:
    """B01."""
    assert color_error(decode_reference(pictures.flat((10, 200, 30), kind="PNG")), (10, 200, 30)) == 0


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM"])
def test_other_formats_decode(kind: str) -> None:
    data = pictures.flat((248, 0, 0), kind=kind)
    assert reference_size(data) == decode.StoredSize(64, 48, 1)
    assert color_error(decode_reference(data), (248, 0, 0)) <= 3


@pytest.mark.parametrize("adobe", [True, False])
@pytest.mark.parametrize(("ink", "color"), [((0, 255, 255, 0), (255, 0, 0)), ((0, 255, 255, 64), (191, 0, 0))])
def test_cmyk_has_the_right_colours_with_and_without_the_adobe_segment(
    adobe: bool, ink: tuple[int, int, int, int], color: tuple[int, int, int]
) -> None:
    """B03, B05."""
    pixels = decode_reference(pictures.cmyk(ink, adobe=adobe))
    assert pixels.shape == (48, 64, 3)
    assert color_error(pixels, color) <= 3


@pytest.mark.parametrize(("value", "expected"), [(0, 0), (100, 0), (257, 1), (32768, 128), (65535, 255)])
def test_sixteen_bit_gray_is_scaled(value: int, expected: int) -> None:
    """B08."""
    assert color_error(decode_reference(pictures.gray_16_bit(value)), (expected,) * 3) == 0


def test_sixteen_bit_gray_in_a_tiff_of_either_byte_order_is_scaled() -> None:
    """B08."""
    for order in ("<u2", ">u2"):
        data = pictures.encode(Image.fromarray(np.full((4, 5), 32768, order)), "TIFF")
        assert color_error(decode_reference(data), (128,) * 3) == 0


def test_integers_beyond_sixteen_bits_are_clipped_to_them() -> None:
    """B08."""
    data = pictures.encode(Image.fromarray(np.array([[-5, 32768, 65535, 10**6]], np.int32)), "TIFF")
    assert decode_reference(data)[0, :, 0].tolist() == [0, 128, 255, 255]


def test_of_two_pictures_the_first_counts() -> None:
    """B13."""
    data = pictures.two_pictures()
    assert Image.open(io.BytesIO(data)).format == "MPO"
    for decoder in ALL:
        np.testing.assert_array_equal(decoder(data), decode_reference(pictures.smooth()))


def test_hidden_colours_stay() -> None:
    """B14."""
    assert color_error(decode_reference(pictures.hidden_red()), (255, 0, 0)) == 0


@pytest.mark.parametrize("transparency", [None, 0, 1, b"\x00\xff", b"\x80\x10"])
def test_palettes_are_exact_with_and_without_transparency(transparency: int | bytes | None) -> None:
    """B14."""
    pixels = decode_reference(pictures.palette(transparency=transparency))
    assert color_error(pixels[:, :32], (10, 20, 30)) == 0
    assert color_error(pixels[:, 32:], (200, 100, 50)) == 0


@pytest.mark.parametrize(
    ("mode", "color", "expected"),
    [
        ("1", 1, (255, 255, 255)),
        ("LA", (90, 0), (90, 90, 90)),
        ("L", 90, (90, 90, 90)),
        ("RGBA", (1, 2, 3, 4), (1, 2, 3)),
    ],
)
def test_every_mode_of_a_png_becomes_rgb(mode: str, color: int | tuple[int, ...], expected: tuple[int, ...]) -> None:
    pixels = decode_reference(pictures.encode(Image.new(mode, (7, 5), color), "PNG"))
    assert pixels.shape == (5, 7, 3)
    assert color_error(pixels, expected) == 0


def test_floats_become_rgb_as_pillow_converts_them() -> None:
    data = pictures.encode(Image.new("F", (7, 5), 90.7), "TIFF")
    assert color_error(decode_reference(data), (90, 90, 90)) <= 1


@each_decoder
@pytest.mark.parametrize("data", [pictures.twelve_bit(), pictures.lossless()], ids=["12 bits", "lossless"])
def test_other_precisions_and_processes_are_errors(decoder: Decoder, data: bytes) -> None:
    """B09."""
    with pytest.raises(DecodeError):
        decoder(data)


@each_fast
@pytest.mark.parametrize("share", [0.5, 0.9])
@pytest.mark.parametrize("progressive", [False, True])
def test_a_cut_file_is_an_error_for_all(fast: Decoder, share: float, progressive: bool) -> None:
    """B15."""
    data = pictures.cut(share, progressive=progressive)
    assert reference_size(data) == decode.StoredSize(256, 256, 1)
    with pytest.raises(DecodeError, match=r"shard-000001\.tar member 7\.jpg: .*truncated"):
        decode_reference(data, where="shard-000001.tar member 7.jpg")
    with pytest.raises(DecodeError):
        fast(data)


@each_decoder
@pytest.mark.parametrize("kind", pictures.NO_PICTURES)
def test_what_is_no_picture_is_an_error(decoder: Decoder, kind: str) -> None:
    """B17."""
    with pytest.raises(DecodeError):
        decoder(pictures.NO_PICTURES[kind])


@pytest.mark.parametrize(
    ("kind", "told"),
    [("empty", "empty file"), ("a web page", "<html>404</html>"), ("a start marker only", "2 bytes")],
)
def test_the_message_says_which_file_what_was_found_and_what_to_do(kind: str, told: str) -> None:
    """B17, B24."""
    for ask in (decode_reference, reference_size):
        with pytest.raises(DecodeError) as caught:
            ask(pictures.NO_PICTURES[kind], where="ant/0001.JPEG")
        assert caught.value.subject == "ant/0001.JPEG"
        assert told in str(caught.value)
        assert "Pillow" in caught.value.expected
        assert "on_error" in caught.value.remedy


@each_fast
def test_unnoticed_damage_gives_the_references_pixels_or_an_error(fast: Decoder) -> None:
    """B18."""
    data = pictures.scan_of_zeros()
    reference = decode_reference(data)
    assert reference.shape == (256, 256, 3)
    try:
        pixels = fast(data)
    except DecodeError:
        return
    np.testing.assert_array_equal(pixels, reference)


@pytest.mark.parametrize("kind", pictures.JUNK)
def test_junk_around_the_end_marker_changes_nothing(kind: str) -> None:
    """B20: the reference decodes it; a fast decoder does too, or leaves it to the reference."""
    good = pictures.smooth()
    data = pictures.JUNK[kind](good)
    np.testing.assert_array_equal(decode_reference(data), decode_reference(good))
    for fast in FAST:
        try:
            pixels = fast(data)
        except DecodeError:
            continue
        np.testing.assert_array_equal(pixels, decode_reference(good))


def test_a_header_that_claims_too_many_pixels_is_refused_before_memory_is_taken() -> None:
    """B21: peak memory, measured in a process of its own."""
    code = (
        "import resource\n"
        "from fastdata.decode import decode_reference, reference_size\n"
        "from fastdata.errors import DecodeError\n"
        "from tests import pictures\n"
        "decode_reference(pictures.smooth())\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "for ask in (decode_reference, reference_size):\n"
        "    try:\n"
        "        ask(pictures.claiming(), where='x.jpg')\n"
        "    except DecodeError as exc:\n"
        "        assert '65500 x 65500' in str(exc) and '178,956,970' in str(exc), exc\n"
        "    else:\n"
        "        raise SystemExit('decoded')\n"
        "assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_pixel_limit_is_pillows_default_bound_and_silent_below(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 2 * Image.MAX_IMAGE_PIXELS == pytest.approx(PIXEL_LIMIT, abs=1)
    below, above = pictures.claiming(12_000, 14_912), pictures.claiming(12_000, 14_914)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert reference_size(below) == decode.StoredSize(12_000, 14_912, 1)
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
        with pytest.raises(DecodeError, match="12000 x 14914"):
            reference_size(above)


def test_no_file_handle_is_left() -> None:
    decode_reference(pictures.smooth(kind="TIFF"))
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        for data in (pictures.smooth(), pictures.two_pictures(), pictures.smooth(kind="TIFF")):
            decode_reference(data)
            reference_size(data)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(["JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP", "MPO"]), st.integers(0, 2**32 - 1))
def test_random_damage_gives_pixels_or_a_decode_error(kind: str, seed: int) -> None:
    random = np.random.default_rng(seed)
    data = bytearray(pictures.noise(40, 30, kind=kind))
    for _ in range(random.integers(1, 8)):
        data[random.integers(0, min(len(data), 600))] = random.integers(0, 256)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            size, pixels = reference_size(bytes(data)), decode_reference(bytes(data))
        except DecodeError:
            return
    assert pixels.dtype == np.uint8
    assert pixels.shape == (size.height, size.width, 3)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_orientation_is_read_but_pixels_stay_as_stored(orientation: int, kind: str) -> None:
    """B27."""
    data = pictures.oriented(orientation, kind)
    assert reference_size(data) == decode.StoredSize(64, 48, orientation)
    stored = decode_reference(data)
    assert stored.shape == (48, 64, 3)
    assert color_error(stored[4:20, 4:28], pictures.RED) < 60
    if kind == "JPEG":
        for fast in FAST:
            np.testing.assert_array_equal(fast(data), stored)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orient_turns_the_picture_upright(orientation: int) -> None:
    """B27."""
    upright = orient(np.asarray(pictures.quadrants()), orientation)
    assert upright.flags.c_contiguous
    assert upright.shape == ((48, 64, 3) if orientation < 5 else (64, 48, 3))
    height, width = upright.shape[:2]
    corners = (upright[0, 0], upright[0, width - 1], upright[height - 1, 0], upright[height - 1, width - 1])
    assert tuple(tuple(corner.tolist()) for corner in corners) == pictures.UPRIGHT_QUADRANTS[orientation]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_tiff_comes_out_upright_once(orientation: int) -> None:
    """B27: Pillow turns TIFFs while loading; size and pixels say the same, and nobody turns them again."""
    data = pictures.oriented(orientation, "TIFF")
    size, pixels = reference_size(data), decode_reference(data)
    assert size.orientation == 1
    assert pixels.shape == (size.height, size.width, 3)
    assert tuple(pixels[0, 0].tolist()) == pictures.UPRIGHT_QUADRANTS[orientation][0]


@pytest.mark.parametrize("orientation", [0, 9, 65535])
def test_an_orientation_that_does_not_exist_is_none(orientation: int) -> None:
    assert reference_size(pictures.oriented(orientation)).orientation == 1


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data:UserWarning")
def test_broken_exif_leaves_the_picture_whole() -> None:
    good = pictures.smooth()
    data = pictures.broken_exif(good)
    assert reference_size(data) == decode.StoredSize(200, 150, 1)
    np.testing.assert_array_equal(decode_reference(data), decode_reference(good))


@settings(max_examples=200, deadline=None)
@given(st.data(), st.integers(1, 8), st.integers(1, 40), st.integers(1, 40))
def test_a_window_cut_from_the_stored_picture_is_that_of_the_upright_one(
    data: st.DataObject, orientation: int, width: int, height: int
) -> None:
    stored = pictures.noise_pixels(width, height)
    upright = orient(stored, orientation)
    top = data.draw(st.integers(0, upright.shape[0] - 1))
    left = data.draw(st.integers(0, upright.shape[1] - 1))
    rows = data.draw(st.integers(1, upright.shape[0] - top))
    columns = data.draw(st.integers(1, upright.shape[1] - left))
    window = (top, left, rows, columns)
    y, x, h, w = stored_window(window, orientation, width, height)
    np.testing.assert_array_equal(
        orient(stored[y : y + h, x : x + w], orientation), upright[top : top + rows, left : left + columns]
    )
    many = stored_windows(*(np.array([value]) for value in (window, orientation, width, height)))
    assert many.tolist() == [[y, x, h, w]]


def test_torchvisions_deprecation_is_kept_from_users() -> None:
    code = (
        "import warnings; warnings.simplefilter('error', DeprecationWarning)\n"
        "import torchvision.io\n"
        "from fastdata.decode import decode_torchvision\n"
        "from tests import pictures\n"
        "assert decode_torchvision(pictures.smooth()).shape == (150, 200, 3)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("decoder", "library"), [(decode_torchvision, "torchvision"), (decode_turbo, "simplejpeg")])
def test_a_missing_library_is_said(decoder: Decoder, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    load = {"torchvision": decode._torchvision_decoder, "simplejpeg": decode._simplejpeg}[library]
    load.cache_clear()
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(BackendUnavailableError, match=f"{library}: .*Install {library}"):
        decoder(pictures.smooth())
    monkeypatch.undo()
    assert decoder(pictures.smooth()).shape == (150, 200, 3)


def test_importing_the_module_loads_no_decoder() -> None:
    code = (
        "import sys, fastdata.decode\n"
        "loaded = {'PIL', 'torch', 'torchvision', 'simplejpeg'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"<html>404</html>", r"16 bytes starting with b'<html>404</html>': no format that Pillow knows"),
        (b"GIF89a", r"6 bytes starting with b'GIF89a': GIF: unpack_from[^;]*"),
    ],
)
def test_a_refusal_names_only_formats_that_the_first_bytes_claim(data: bytes, reason: str) -> None:
    with pytest.raises(DecodeError) as caught:
        decode_reference(data)
    assert re.fullmatch(reason, caught.value.found)
