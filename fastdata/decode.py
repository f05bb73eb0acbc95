"""Owns the way from encoded bytes to RGB pixels on the CPU: the reference (Pillow), two fast JPEG decoders, EXIF turns.

The reference reads everything and its word, pixels or error, is final. The fast decoders take JPEGs of 8 bits and 1 or
3 components (`fastdata.jpeg` tells) and give the same pixels; on any `DecodeError` of theirs the caller asks the
reference. All three leave the picture as stored; `orient` turns it.

Thread safety: every function may be called from many threads. The decoders release the GIL while they decode.
"""

from __future__ import annotations

import functools
import io
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fastdata.errors import BackendUnavailableError, DecodeError
from fastdata.spec import PIXEL_LIMIT
from fastdata.wording import counted

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFile import ImageFile

    from fastdata.sources import Encoded

Window = tuple[int, int, int, int]
"""Top, left, height, width, in pixels."""

_EXIF_ORIENTATION = 0x0112
# EXIF orientation -> (axes swapped, then rows reversed, then columns reversed) to see the picture upright.
_TURNS = {
    1: (False, False, False),
    2: (False, False, True),
    3: (False, True, True),
    4: (False, True, False),
    5: (True, False, False),
    6: (True, False, True),
    7: (True, True, True),
    8: (True, True, False),
}
_TURN_TABLE = np.array([_TURNS[max(orientation, 1)] for orientation in range(9)])


@dataclass(frozen=True, slots=True)
class StoredSize:
    """A picture's size as `decode_reference` returns it, and how it has to be turned."""

    width: int
    """Columns, in pixels, before any turn."""
    height: int
    """Rows, in pixels, before any turn."""
    orientation: int
    """EXIF orientation 1..8; 1 where there is none or it is not among these."""


def decode_reference(
    data: Encoded, *, where: str = "", region: Window | None = None, reduction: int = 1, upright: bool = False
) -> NDArray[np.uint8]:
    """Decode any picture that Pillow reads.

    Colour: CMYK and YCCK, palettes and gray become RGB as Pillow converts them; alpha is dropped and hidden colour
    kept; 16-bit gray is scaled by 1/257 (Pillow alone clips it to white), and so are 32-bit integers, Pillow's other
    reading of such files; of many pictures in a file the first counts; ICC profiles are ignored. A TIFF comes out
    upright, since Pillow turns it while loading. ``PIL.ImageFile.LOAD_TRUNCATED_IMAGES`` is taken to be False, its
    default: where a program sets it, cut files decode with gray instead of an error.

    Args:
        data: The encoded picture.
        where: Path, or shard and member, for the message.
        region: Top, left, height, width of the only pixels that are wanted; None: all. Leaving the others out saves
            their copy from Pillow's memory, which costs a third of a decode. In pixels of the reduced picture.
        reduction: 1, 2, 4 or 8, for JPEGs only: decode this many pixels, across and down, to one (Pillow's draft
            mode), so that the result has ceil(height / reduction) rows. Pixels are not those of a resize.
        upright: Whether to apply the EXIF orientation; not together with a region.

    Returns:
        (h, w, 3) uint8 RGB, C-contiguous, as stored unless `upright`.

    Raises:
        DecodeError: Pillow does not read it, or it has more than `PIXEL_LIMIT` pixels.
    """
    with _opened(data, where) as picture:
        if reduction > 1:
            picture.draft(None, (picture.width // reduction, picture.height // reduction))
        turn = _orientation(picture) if upright else 1
        return orient(_rgb(picture, region), turn)


def reference_size(data: Encoded, *, where: str = "") -> StoredSize:
    """Return the size and orientation of any picture that Pillow opens, without decoding it.

    Args:
        data: The encoded picture.
        where: Path, or shard and member, for the message.

    Raises:
        DecodeError: As `decode_reference`; but damage behind the header goes unseen.
    """
    with _opened(data, where) as picture:
        return StoredSize(picture.width, picture.height, _orientation(picture))


def decode_torchvision(data: Encoded) -> NDArray[np.uint8]:
    """Decode a JPEG of 8 bits and 1 or 3 components with torchvision's libjpeg-turbo.

    Args:
        data: The encoded picture. The caller has checked bits and components: others come out in other colours.

    Returns:
        (h, w, 3) uint8 RGB, C-contiguous, as stored; a view of the tensor's memory.

    Raises:
        DecodeError: The decoder refuses it. Ask the reference.
        BackendUnavailableError: torchvision is missing or decodes no more.
    """
    decode = _torchvision_decoder()
    try:
        return decode(data)
    except (RuntimeError, ValueError) as exc:  # ValueError: torch takes no empty buffer
        raise DecodeError("", f"torchvision's JPEG decoder: {_first_line(exc)}") from exc


def decode_turbo(data: Encoded, buffer: NDArray[np.uint8] | None = None, reduction: int = 1) -> NDArray[np.uint8]:
    """Decode a JPEG of 8 bits and 1 or 3 components with simplejpeg (libjpeg-turbo).

    Args:
        data: The encoded picture.
        buffer: (n,) uint8 memory for the pixels, which the result then points into: the next call with it overwrites
            last result. Where it is too small, the result has memory of its own.
        reduction: 1, 2, 4 or 8: decode this many pixels, across and down, to one (libjpeg's scaled inverse DCT), so
            that the result has ceil(height / reduction) rows. Pixels are not those of a resize.

    Returns:
        (h, w, 3) uint8 RGB, C-contiguous, as stored.

    Raises:
        DecodeError: The decoder refuses it, or finds the slightest damage. Ask the reference.
        BackendUnavailableError: simplejpeg is missing.
    """
    simplejpeg = _simplejpeg()
    try:
        least_height = least_width = 0
        if buffer is not None or reduction > 1:
            height, width, _, _ = simplejpeg.decode_jpeg_header(data)
            if reduction > 1:  # simplejpeg takes the smallest of libjpeg's scales that reaches these
                height = least_height = -(-height // reduction)
                width = least_width = -(-width // reduction)
            if buffer is not None and height * width * 3 > buffer.size:
                buffer = None
        # The faster transform and upsampling differ from libjpeg's defaults, hence from the reference.
        pixels: NDArray[np.uint8] = simplejpeg.decode_jpeg(
            data, "RGB", False, False, least_height, least_width, 1, buffer, True
        )
    except ValueError as exc:
        raise DecodeError("", f"libjpeg-turbo: {_first_line(exc)}") from exc
    except KeyError as exc:  # of its table of chroma subsamplings, which lacks 4:4:1
        raise DecodeError("", f"simplejpeg: unknown chroma subsampling, number {exc}") from exc
    return pixels


def orient(pixels: NDArray[np.uint8], orientation: int) -> NDArray[np.uint8]:
    """Turn a picture as its EXIF orientation says.

    Args:
        pixels: (h, w, 3) uint8 as stored.
        orientation: 1..8.

    Returns:
        The upright picture, C-contiguous: (h, w, 3) for 1..4, (w, h, 3) for 5..8; `pixels` itself for 1.
    """
    swap, reverse_rows, reverse_columns = _TURNS[orientation]
    turned = pixels.transpose(1, 0, 2) if swap else pixels
    return np.ascontiguousarray(turned[:: -1 if reverse_rows else 1, :: -1 if reverse_columns else 1])


def turn_reverses(orientations: NDArray[np.integer[Any]]) -> NDArray[np.bool_]:
    """Return (n, 2): whether `orient` reverses the rows and columns of the upright picture, by EXIF orientation."""
    reversed_axes: NDArray[np.bool_] = _TURN_TABLE[orientations][:, 1:]
    return reversed_axes


def stored_window(window: Window, orientation: int, width: int, height: int) -> Window:
    """Return where a window of the upright picture lies in the stored one.

    Args:
        window: Top, left, height, width in the upright picture.
        orientation: 1..8.
        width: Columns of the stored picture.
        height: Rows of the stored picture.

    Returns:
        Top, left, height, width in the stored picture. ``orient`` of those pixels is the window of the upright picture.
    """
    top, left, rows, columns = window
    swap, reverse_rows, reverse_columns = _TURNS[orientation]
    if reverse_rows:
        top = (width if swap else height) - top - rows
    if reverse_columns:
        left = (height if swap else width) - left - columns
    return (left, top, columns, rows) if swap else (top, left, rows, columns)


def stored_windows(
    windows: NDArray[np.int64],
    orientations: NDArray[np.integer[Any]],
    widths: NDArray[np.integer[Any]],
    heights: NDArray[np.integer[Any]],
) -> NDArray[np.int64]:
    """Return `stored_window` of many pictures at once.

    Args:
        windows: (n, 4) int64: top, left, height, width in the upright pictures.
        orientations: (n,) EXIF orientations 1..8; 0 counts as 1.
        widths: (n,) columns of the stored pictures.
        heights: (n,) rows of the stored pictures.

    Returns:
        (n, 4) int64: top, left, height, width in the stored pictures.
    """
    swap, reverse_rows, reverse_columns = _TURN_TABLE[orientations].T
    stored = windows.astype(np.int64)
    upright_heights = np.where(swap, widths, heights)
    upright_widths = np.where(swap, heights, widths)
    stored[:, 0] = np.where(reverse_rows, upright_heights - windows[:, 0] - windows[:, 2], windows[:, 0])
    stored[:, 1] = np.where(reverse_columns, upright_widths - windows[:, 1] - windows[:, 3], windows[:, 1])
    stored[swap] = stored[swap][:, [1, 0, 3, 2]]
    return stored


@contextmanager
def _opened(data: Encoded, where: str) -> Iterator[ImageFile]:
    """Open a picture with Pillow and check its size. What Pillow raises, here or in the body, becomes DecodeError."""
    expected, remedy = "a picture that Pillow decodes", 'Repair or remove the file, or leave it out (on_error="skip").'
    try:
        with _open(data) as picture:
            if picture.width * picture.height > PIXEL_LIMIT:
                found = f"{picture.width} x {picture.height} pixels claimed in {len(data):,} bytes"
                raise DecodeError(where, found, f"at most {PIXEL_LIMIT:,} pixels", remedy)
            yield picture
    except (DecodeError, Warning):  # a warning is an exception only where the program asked for that
        raise
    except MemoryError as exc:
        raise DecodeError(where, "more pixels than there is memory for", expected, remedy) from exc
    except Exception as exc:  # damaged bytes raise nearly anything within Pillow's 50 format plugins
        start = bytes(data[:16])
        found = (
            f"{counted(len(data), 'byte')} starting with {start!r}: {_first_line(exc)}" if start else "an empty file"
        )
        raise DecodeError(where, found, expected, remedy) from exc


def _open(data: Encoded) -> ImageFile:
    """Open a picture as ``Image.open`` does.

    Not by ``Image.open``: it warns from half the pixel limit on, and neither Pillow's limit nor Python's warning
    filters can be changed for one thread alone.
    """
    from PIL import Image, UnidentifiedImageError  # 40 ms, and needless where only fast decoders run

    stream = io.BytesIO(data)
    prefix = stream.read(16)
    tried: set[str] = set()
    refusals = []
    for load_plugins in (Image.preinit, Image.init):
        load_plugins()
        for name in [name for name in Image.ID if name not in tried]:
            tried.add(name)
            factory, accept = Image.OPEN[name]
            claimed = accept(prefix) if accept is not None else True  # those that cannot tell are tried on everything
            if isinstance(claimed, str):  # a known format that this build of Pillow was compiled without
                refusals.append(claimed)
            elif claimed:
                stream.seek(0)
                try:
                    picture = factory(stream, "")
                    # All bytes at once: libjpeg's arithmetic decoder fails where it has to wait for more of them.
                    picture.decodermaxblock = max(picture.decodermaxblock, len(data))
                    return picture
                except (SyntaxError, IndexError, TypeError, struct.error) as exc:  # a plugin's way to say "not mine"
                    if accept is not None:
                        refusals.append(f"{name}: {_first_line(exc)}")
    raise UnidentifiedImageError("; ".join(refusals) or "no format that Pillow knows")


def _orientation(picture: ImageFile) -> int:
    if picture.format == "TIFF":  # turned by Pillow while loading; its size is the turned one from the start
        return 1
    try:
        found = picture.getexif().get(_EXIF_ORIENTATION, 1)
    except Exception:  # broken EXIF leaves the pixels whole; Pillow raises nearly anything on it
        return 1
    return int(found) if found in _TURNS else 1


def _rgb(picture: ImageFile, region: Window | None) -> NDArray[np.uint8]:
    """Decode an opened picture, or a region of it, to (h, w, 3) uint8."""
    picture.load()
    picture.info.pop("transparency", None)  # else Pillow warns of, and computes, what RGB cannot keep
    wanted: Image = picture
    if region is not None:
        top, left, height, width = region
        wanted = picture.crop((left, top, left + width, top + height))
    if wanted.mode.startswith("I"):  # "I;16" and its byte orders, or "I"
        values = np.clip(np.asarray(wanted, dtype=np.int64), 0, 65535)
        gray = ((values + 128) // 257).astype(np.uint8)
        return np.repeat(gray[:, :, None], 3, axis=2)
    return np.array(wanted if wanted.mode == "RGB" else wanted.convert("RGB"))


@functools.cache
def _torchvision_decoder() -> Callable[[Encoded], NDArray[np.uint8]]:
    """Return a decoder on torchvision's operator itself: the function around it warns at each call from 0.29 on."""
    remedy = "Install torchvision >= 0.21 that still decodes images, or choose another backend."
    try:
        import torch
        import torchvision.io
    except ImportError as exc:
        raise BackendUnavailableError("torchvision", f"cannot be imported: {exc}", "", remedy) from exc
    try:
        decode_jpeg = torch.ops.image.decode_jpeg
    except AttributeError as exc:
        found = f"torchvision {torchvision.__version__} without a JPEG decoder"
        raise BackendUnavailableError("torchvision", found, "the operator image::decode_jpeg", remedy) from exc
    rgb = 3  # ImageReadMode.RGB

    def decode(data: Encoded) -> NDArray[np.uint8]:
        # A copy (5 us for 100 KB), since torch warns of memory that it may not write.
        encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        pixels: NDArray[np.uint8] = decode_jpeg(encoded, rgb, False).permute(1, 2, 0).numpy()
        return np.ascontiguousarray(pixels)

    return decode


@functools.cache
def _simplejpeg() -> Any:
    try:
        import simplejpeg
    except ImportError as exc:
        remedy = "Install simplejpeg, or choose another decoder."
        raise BackendUnavailableError("simplejpeg", f"cannot be imported: {exc}", "", remedy) from exc
    return simplejpeg


def _first_line(exc: BaseException) -> str:
    return str(exc).strip().partition("\n")[0]
