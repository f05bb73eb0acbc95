"""Claims about `fastdata.jpeg`: what a header says, and which files fast decoders may take."""

from __future__ import annotations

import io
import struct

import numpy as np
import pytest
from PIL import Image

from fastdata import jpeg


def encode(width: int = 67, height: int = 45, mode: str = "RGB", **options: object) -> bytes:
    pixels = np.random.default_rng(width * 1000 + height).integers(
        0, 256, (height, width, len(Image.new(mode, (1, 1)).getbands()))
    )
    target = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8).squeeze(), mode if mode == "CMYK" else None).save(target, "JPEG", **options)
    return target.getvalue()


def with_segment(data: bytes, marker: int, payload: bytes) -> bytes:
    return data[:2] + bytes([0xFF, marker]) + struct.pack(">H", len(payload) + 2) + payload + data[2:]


def exif(orientation: int, order: str, kind: int = 3, count: int = 1) -> bytes:
    mark = b"II*\x00" if order == "<" else b"MM\x00*"
    value = struct.pack(order + {1: "B3x", 3: "H2x", 4: "I"}[kind], orientation)
    return b"Exif\x00\x00" + mark + struct.pack(order + "IHHHI", 8, 1, 0x0112, kind, count) + value + bytes(4)


def refusal(data: bytes) -> str | None:
    return jpeg.REFUSALS[jpeg.read_header(data).refusal] or None


def with_byte(data: bytes, at: int, value: int) -> bytes:
    return data[:at] + bytes([value]) + data[at + 1 :]


@pytest.mark.parametrize(("subsampling", "mcu"), [("4:4:4", (8, 8)), ("4:2:2", (16, 8)), ("4:2:0", (16, 16))])
def test_header_gives_size_and_mcu_of_each_sampling(subsampling: str, mcu: tuple[int, int]) -> None:
    header = jpeg.read_header(encode(subsampling=subsampling))
    assert (header.width, header.height, header.components, header.precision) == (67, 45, 3, 8)
    assert (header.mcu_width, header.mcu_height) == mcu
    assert header.refusal == jpeg.TAKEN


def test_gray_has_one_block_per_mcu() -> None:
    header = jpeg.read_header(encode(mode="L"))
    assert (header.components, header.mcu_width, header.mcu_height, header.refusal) == (1, 8, 8, jpeg.TAKEN)


def test_process_and_restart_interval_are_read() -> None:
    assert jpeg.read_header(encode(progressive=True)).process == 2
    assert jpeg.read_header(encode(restart_marker_blocks=3)).restart_interval == 3


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("kind", [1, 3, 4])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_read_in_both_byte_orders(orientation: int, kind: int, order: str) -> None:
    assert jpeg.read_header(with_segment(encode(), 0xE1, exif(orientation, order, kind))).orientation == orientation


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_agrees_with_what_pillow_writes(orientation: int) -> None:
    tags = Image.Exif()
    tags[0x0112] = orientation
    assert jpeg.read_header(encode(exif=tags)).orientation == orientation


@pytest.mark.parametrize(
    "payload",
    [
        exif(0, "<"),
        exif(9, ">"),
        exif(6, "<", count=2),
        exif(6, "<")[:20],
        b"Exif\x00\x00",
        b"Exif\x00\x00II*\x00" + struct.pack("<I", 0xFFFFFFFF) + bytes(20),
        b"Exif\x00\x00II*\x00" + struct.pack("<IH", 8, 0xFFFF) + bytes(20),
        b"Exif\x00\x00XX*\x00" + bytes(30),
    ],
)
def test_hostile_exif_counts_as_upright(payload: bytes) -> None:
    header = jpeg.read_header(with_segment(encode(), 0xE1, payload))
    assert (header.orientation, header.refusal) == (1, jpeg.TAKEN)


def test_thumbnail_inside_exif_is_not_taken_for_the_picture() -> None:
    header = jpeg.read_header(with_segment(encode(), 0xE1, exif(6, "<") + encode(16, 16)))
    assert (header.width, header.height, header.orientation) == (67, 45, 6)


@pytest.mark.parametrize("data", [b"", b"\xff", b"\xff\xd8", b"<html>404</html>", b"\x89PNG\r\n\x1a\n" + bytes(50)])
def test_what_is_no_jpeg_says_so(data: bytes) -> None:
    assert refusal(data) == "not a JPEG"


def test_each_odd_kind_is_refused_with_its_reason() -> None:
    data = encode()
    sof = jpeg.read_header(data).sof_offset
    assert refusal(with_byte(data, sof + 4, 12)) == "samples that are not 8-bit"
    assert refusal(encode(mode="CMYK")) == "not 1 or 3 components"
    for process in (3, 5, 6, 7, 11, 13, 14, 15):
        assert refusal(with_byte(data, sof + 1, 0xC0 + process)) == "lossless or hierarchical coding"
    for process in (9, 10):
        assert refusal(with_byte(data, sof + 1, 0xC0 + process)) == "arithmetic coding"
        assert refusal(with_byte(data[:-200], sof + 1, 0xC0 + process)) == "no end-of-image marker"
    assert refusal(data[: sof + 5] + b"\0\0" + data[sof + 7 :]) == "height defined after the scan"
    assert refusal(data[: sof + 5] + b"\xff\xff\xff\xff" + data[sof + 9 :]) == "more pixels than the limit"
    assert refusal(encode(keep_rgb=True)) == "RGB-coded JPEG"
    assert refusal(with_byte(data, sof + 11, 0x42)) == "unusual chroma sampling"
    assert refusal(data[:-200]) == "no end-of-image marker"
    assert refusal(data[: sof + 5] + b"\0\x10\0\0" + data[sof + 9 :]) == "damaged JPEG header"


def test_adobe_transform_decides_the_colour_where_no_jfif_is() -> None:
    data = encode(keep_rgb=True)
    assert jpeg.read_header(data).adobe == 0
    assert refusal(with_segment(data, 0xE0, b"JFIF\0\1\1\0\0\1\0\1\0\0")) is None


@pytest.mark.parametrize("tail", [bytes(1000), b"\x7f\xff\xd9", encode(16, 16), b"\xff"])
def test_junk_after_the_picture_is_no_reason_to_refuse(tail: bytes) -> None:
    assert refusal(encode() + tail) is None


def test_fill_bytes_before_a_marker_are_legal() -> None:
    data = encode()
    assert jpeg.read_header(data[:2] + b"\xff\xff\xff" + data[2:]).refusal == jpeg.TAKEN


def test_junk_between_segments_is_unusual() -> None:
    data = with_segment(encode(), 0xFE, b"text")
    assert refusal(data[:10] + b"\x00\x01" + data[10:]) == "unusual JPEG header"


def test_every_cut_of_a_file_is_refused_without_an_exception() -> None:
    data = with_segment(encode(progressive=True), 0xE1, exif(6, ">"))
    assert all(refusal(data[:length]) for length in range(len(data) - 1))


def test_hostile_bytes_never_stop_the_reader() -> None:
    rng = np.random.default_rng(0)
    data = np.frombuffer(with_segment(encode(), 0xE1, exif(6, ">")), np.uint8)
    head = jpeg.read_header(data).scan_offset
    spoiled = []
    for _ in range(2000):
        one = data.copy()
        one[rng.integers(0, head, rng.integers(1, 8))] = rng.choice([0, 1, 0xC0, 0xD9, 0xDA, 0xE1, 0xFF], 1)
        spoiled.append(one)
    headers = jpeg.read_headers(spoiled)
    assert len(np.unique(headers["refusal"])) > 4
    assert ((headers["orientation"] >= 1) & (headers["orientation"] <= 8)).all()
    assert (headers["scan_offset"] <= len(data)).all()


def test_batch_and_single_reader_agree_on_every_buffer_type() -> None:
    data = encode()
    buffers = [data, memoryview(data), bytearray(data), np.frombuffer(data, np.uint8), data[:50], b""]
    singles = [jpeg.read_header(buffer) for buffer in buffers]
    batch = jpeg.read_headers(buffers)
    assert [jpeg.JpegHeader(*row) for row in batch.tolist()] == singles
    assert singles[0] == singles[3]


def test_an_empty_batch_is_an_empty_array() -> None:
    assert len(jpeg.read_headers([])) == 0


def test_fields_of_record_and_dataclass_are_the_same() -> None:
    assert tuple(jpeg.JpegHeader.__slots__) == jpeg.HEADER_DTYPE.names
