"""Loading some samples of a batch on the CPU: read, look, cut, decode, turn, resize, mirror, user callables.

The ordinary way takes many JPEGs at a time, so that the steps that do not need Python run once for all of them without
the GIL. Whatever it cannot take, and every file on which it fails, goes one by one through the Pillow reference, whose
word (pixels or error) is final.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastdata.backends._meter import Meter
from fastdata.decode import decode_reference, decode_torchvision, decode_turbo, orient, stored_windows, turn_reverses
from fastdata.errors import DecodeError, SourceError, WorkerError
from fastdata.geometry import (
    Geometry,
    choose_reductions,
    needed_windows,
    plan_geometry,
    reduced_windows,
    upright_sizes,
)
from fastdata.jpeg import REFUSALS
from fastdata.jpeg_cut import Files, cut_all, locate_files
from fastdata.resample import plan_resamples, resample_planned
from fastdata.rng import STREAM_CALLABLE, keys
from fastdata.sources import Encoded, SampleReader
from fastdata.spec import Decode, Orientation
from fastdata.transforms import Recipe

Region = tuple[int, int, int, int]
"""Top, left, height, width, in pixels as the file stores them, reduced."""
Decoded = tuple[NDArray[np.uint8], int, int]
"""(h, w, 3) uint8 pixels of at least the region that was asked for, and the row and column at which they begin."""


def _decode_by_pillow(data: Encoded, region: Region, reduction: int) -> Decoded:
    return decode_reference(data, region=region, reduction=reduction), region[0], region[1]


def _decode_by_torchvision(data: Encoded, _region: Region, _reduction: int) -> Decoded:
    return decode_torchvision(data), 0, 0


_FIRST_PIXEL_BYTES = 4 << 20  # 1.4 megapixels


class _Pixels(threading.local):
    """A thread's memory for the picture that it decoded last, which is resized before the next one is decoded.

    Outside of the main thread the C library gives the memory of each picture back to the system: fresh pages for every
    picture took 200 us of 1,000.
    """

    def __init__(self) -> None:
        self.memory = np.empty(_FIRST_PIXEL_BYTES, np.uint8)


_pixels_of_thread = _Pixels()


def _decode_by_turbo(data: Encoded, _region: Region, reduction: int) -> Decoded:
    pixels = decode_turbo(data, _pixels_of_thread.memory, reduction)
    if pixels.size > _pixels_of_thread.memory.size:
        _pixels_of_thread.memory = np.empty(pixels.size * 5 // 4, np.uint8)
    return pixels, 0, 0


DECODERS: dict[str, Callable[[Encoded, Region, int], Decoded]] = {
    "pil": _decode_by_pillow,
    "torchvision": _decode_by_torchvision,
    "turbo": _decode_by_turbo,
}
"""Decoders of ordinary JPEGs by name: of a file, a region and a reduction."""
REDUCING_DECODERS = ("pil", "turbo")
"""Those that can reduce while they decode."""


@dataclass
class ChunkResult:
    """What became of a chunk."""

    count: int
    """Samples asked for, with those that failed."""
    failed: list[tuple[int, str, str]] = field(default_factory=list)
    """(index in the chunk, place, reason) of samples that nothing can load."""
    fallbacks: Counter[str] = field(default_factory=Counter)
    """Samples that the reference took over, by reason."""
    load_s: float = 0.0
    """Seconds spent here."""
    held_s: float = 0.0
    """Of these, seconds of Python code outside of reads, decoders and kernels, while no other thread could run any."""
    read_s: float = 0.0
    """Of these, seconds of reads."""


@dataclass(frozen=True)
class SampleLoader:
    """Everything that is needed to load samples of one pipeline; picklable."""

    source: SampleReader
    """Where encoded pictures come from."""
    recipe: Recipe
    """What is done to them."""
    seed: int
    """Of the draws."""
    orientation: Orientation
    """Whether EXIF orientation is applied."""
    decoder: str
    """A key of `DECODERS`."""
    decode: Decode = "exact"
    """Whether the decoder may reduce large pictures: other pixels."""

    def load(
        self, epoch: int, positions: NDArray[np.int64], ids: NDArray[np.int64], out: NDArray[np.uint8]
    ) -> ChunkResult:
        """Load samples into their places of a batch.

        Args:
            epoch: The epoch's number.
            positions: (n,) int64 positions in the source.
            ids: (n,) int64 sample ids.
            out: (n, H, W, 3) uint8. Written, except for samples that fail.
        """
        started = time.perf_counter()
        meter = Meter()
        result = ChunkResult(len(ids))
        meter.release()
        encoded = self._read(positions, result)
        meter.hold()
        result.read_s = time.perf_counter() - started
        self._load_ordinary(epoch, ids, encoded, out, result, meter)
        meter.release()
        for index, data in encoded.items():
            self._load_by_reference(epoch, int(positions[index]), ids[index : index + 1], data, index, out, result)
        if self.recipe.callables:
            self._call_user(epoch, positions, ids, out, {index for index, _, _ in result.failed})
        result.held_s = meter.held_s
        result.load_s = time.perf_counter() - started
        return result

    def _read(self, positions: NDArray[np.int64], result: ChunkResult) -> dict[int, Encoded]:
        encoded: dict[int, Encoded] = {}
        for index, found in enumerate(self.source.read_many(positions)):
            if isinstance(found, SourceError):
                result.failed.append((index, self.source.where(int(positions[index])), found.found))
            else:
                encoded[index] = found
        return encoded

    def _load_ordinary(
        self,
        epoch: int,
        ids: NDArray[np.int64],
        encoded: dict[int, Encoded],
        out: NDArray[np.uint8],
        result: ChunkResult,
        meter: Meter,
    ) -> None:
        """Load what fast decoders take and drop it from `encoded`; count by reason what they leave to the reference."""
        indices = np.fromiter(encoded, np.int64, len(encoded))
        meter.release()
        files = locate_files(list(encoded.values()))
        meter.hold()
        refusals = files.headers["refusal"]
        counted = self.decoder != "pil"  # for Pillow the reference is no fallback
        if refusals.any():
            if counted:
                result.fallbacks.update(REFUSALS[code] for code in refusals[refusals != 0].tolist())
            taken = np.flatnonzero(refusals == 0)
            indices, files = indices[taken], files.take(taken)
        work = self._plan(epoch, ids[indices], files, meter)
        decode = DECODERS[self.decoder]
        for row, (index, part, turn, reduction, (top, left, height, width)) in enumerate(
            zip(indices.tolist(), work.parts, work.turns, work.reductions, work.regions, strict=True)
        ):
            meter.release()
            try:
                pixels, y, x = decode(part.data, (top - part.top, left - part.left, height, width), reduction)
            except DecodeError as error:
                if counted:
                    result.fallbacks[error.found] += 1
                continue  # the reference has the last word
            finally:
                meter.hold()
            y, x = y + part.top, x + part.left
            if turn != 1:
                pixels = orient(pixels[top - y : top - y + height, left - x : left - x + width], turn)
                y, x = work.upright_origins[row]
            meter.release()
            resample_planned(pixels, (y, x), work.resamples, row, out, index)
            meter.hold()
            del encoded[index]

    def _plan(self, epoch: int, ids: NDArray[np.int64], files: Files, meter: Meter) -> _Work:
        """Work out what has to be done with files that have readable headers."""
        headers = files.headers
        turns = headers["orientation"] if self.orientation == "apply" else np.ones(len(ids), np.int64)
        widths, heights = headers["width"], headers["height"]
        upright_widths, upright_heights = upright_sizes(widths, heights, turns)
        geometry = plan_geometry(self.recipe, self.seed, epoch, ids, upright_widths, upright_heights)
        reductions = np.ones(len(ids), np.int64)
        low, high, upright = geometry.low, geometry.high, needed_windows(geometry)
        if self.decode == "fast":
            reductions = choose_reductions(geometry)
            # A reduced picture may end with a part of a pixel; where a turn reverses an axis, it begins with it.
            sizes = np.stack([upright_heights, upright_widths], axis=1)
            padding = -sizes % reductions[:, None]
            moved = np.where(turn_reverses(turns), padding, 0)
            low, high = low + moved, high + moved
            upright[:, :2] += moved
            upright = reduced_windows(upright, sizes + padding, reductions)
            widths, heights = widths + -widths % reductions, heights + -heights % reductions
        stored = stored_windows(upright, turns, widths, heights)
        flips = geometry.flips
        resamples = plan_resamples(low, high, geometry.full, geometry.offset, geometry.output_size, flips, reductions)
        parts = cut_to_windows(files, stored, reductions, meter)
        steps = reductions[:, None]
        regions, origins = (stored // steps).tolist(), (upright[:, :2] // steps).tolist()
        return _Work(parts, turns.tolist(), reductions.tolist(), regions, origins, resamples)

    def _load_by_reference(
        self,
        epoch: int,
        position: int,
        sample_id: NDArray[np.int64],
        data: Encoded,
        index: int,
        out: NDArray[np.uint8],
        result: ChunkResult,
    ) -> None:
        try:
            picture = decode_reference(data, upright=self.orientation == "apply")
        except DecodeError as error:
            result.failed.append((index, self.source.where(position), error.found))
            return
        height, width = picture.shape[:2]
        geometry = plan_geometry(self.recipe, self.seed, epoch, sample_id, np.array([width]), np.array([height]))
        resample_planned(picture, (0, 0), _plan_whole(geometry), 0, out, index)

    def _call_user(
        self,
        epoch: int,
        positions: NDArray[np.int64],
        ids: NDArray[np.int64],
        out: NDArray[np.uint8],
        without: set[int],
    ) -> None:
        import torch

        from fastdata.seeding import seeded

        sample_keys = keys(self.seed, epoch, ids, STREAM_CALLABLE).tolist()
        for index in range(len(ids)):
            if index in without:
                continue
            picture = torch.from_numpy(out[index]).permute(2, 0, 1).contiguous()
            before = picture.shape
            with seeded(sample_keys[index]):
                for function in self.recipe.callables:
                    try:
                        picture = function(picture)
                    except Exception as exc:
                        where = self.source.where(int(positions[index]))
                        raise WorkerError(
                            f"transform {function!r} on {where}", f"{type(exc).__name__}: {exc}", "a picture"
                        ) from exc
            if not isinstance(picture, torch.Tensor) or picture.shape != before or picture.dtype != torch.uint8:
                found = (
                    f"{tuple(picture.shape)} {picture.dtype}" if isinstance(picture, torch.Tensor) else repr(picture)
                )
                raise WorkerError(f"transform {function!r}", found, f"a uint8 tensor of shape {tuple(before)}")
            out[index] = picture.permute(1, 2, 0).numpy()


@dataclass(frozen=True, slots=True)
class _Work:
    """What has to be done with the n ordinary files of a chunk."""

    parts: list[_Part]
    """What is decoded of each file."""
    turns: list[int]
    """EXIF orientations that are applied."""
    reductions: list[int]
    """What the decoders shall reduce by."""
    regions: list[list[int]]
    """Top, left, height, width of the pixels that are needed, as the file stores them, reduced."""
    upright_origins: list[list[int]]
    """Top and left of the same pixels in the upright picture, reduced."""
    resamples: NDArray[np.int64]
    """Of `fastdata.resample.plan_resamples`."""


@dataclass(frozen=True, slots=True)
class _Part:
    """What is decoded of one file: a cut, or the whole."""

    data: Any
    """An ordinary JPEG: bytes or a view of some."""
    top: int
    """Row of the stored picture that its first row is, reduced."""
    left: int
    """Column of the stored picture that its first column is, reduced."""


def cut_to_windows(
    files: Files, windows: NDArray[np.int64], reductions: NDArray[np.int64], meter: Meter
) -> list[_Part]:
    """Cut crop-ready files to their windows; files that are not crop-ready stay whole and are not copied.

    The cuts are views of the thread's memory and valid until the next call in it.

    Args:
        files: n files with readable headers.
        windows: (n, 4) top, left, height, width in stored pixels.
        reductions: (n,) what the parts will be reduced by while they are decoded.
        meter: Released around kernels.
    """
    if not files.headers["table_offset"].any():
        return [_Part(data, 0, 0) for data in files.buffers]
    memory = _cut_memory.of(int(files.lengths.sum()))
    meter.release()
    pieces, plans = cut_all(files, windows, memory)
    meter.hold()
    # Cuts begin at whole MCUs of 8 or 16 pixels, which every reduction divides.
    tops, lefts = ((plans[side] // reductions).tolist() for side in ("top", "left"))
    return [_Part(*part) for part in zip(pieces, tops, lefts, strict=True)]


class _CutMemory(threading.local):
    """The memory of a thread's cuts, which live until its next chunk: fresh pages cost as much as the cuts."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def of(self, size: int) -> NDArray[np.uint8]:
        """Return at least `size` bytes."""
        if len(self._memory) < size:
            self._memory = np.empty(size + size // 4, np.uint8)
        return self._memory


_cut_memory = _CutMemory()


def _plan_whole(geometry: Geometry) -> NDArray[np.int64]:
    g = geometry
    return plan_resamples(g.low, g.high, g.full, g.offset, g.output_size, g.flips)
