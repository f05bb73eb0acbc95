"""Loading some samples of a batch on the CPU: read, look, cut, decode, turn, resize, mirror, user callables.

The ordinary way takes many JPEGs at a time, so that the steps that do not need Python run once for all of them without
the GIL. Whatever it cannot take, and every file on which it fails, goes one by one through the Pillow reference, whose
word (pixels or error) is final.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from fastdata.decode import (
    decode_reference,
    decode_torchvision,
    decode_turbo,
    orient,
    reference_size,
    stored_windows,
)
from fastdata.errors import DecodeError, SourceError, WorkerError
from fastdata.geometry import Geometry, needed_windows, plan_geometry, upright_sizes
from fastdata.jpeg import REFUSALS
from fastdata.jpeg_cut import CUT, Files, locate_files, plan_cuts, write_cuts
from fastdata.resample import Axis, resample_into
from fastdata.rng import STREAM_CALLABLE, keys
from fastdata.sources import Encoded, SampleReader
from fastdata.spec import Orientation
from fastdata.transforms import Recipe

Region = tuple[int, int, int, int]
"""Top, left, height, width in stored pixels."""


def _decode_whole(decode: Callable[[Encoded], NDArray[np.uint8]], data: Encoded, _region: Region) -> Decoded:
    return Decoded(decode(data), 0, 0)


def _decode_region_by_pillow(data: Encoded, region: Region) -> Decoded:
    return Decoded(decode_reference(data, region=region), region[0], region[1])


@dataclass(frozen=True, slots=True)
class Decoded:
    """Pixels of at least the region that was asked for."""

    pixels: NDArray[np.uint8]
    """(h, w, 3) uint8."""
    top: int
    """Row of the encoded picture that the first row is."""
    left: int
    """Column of the encoded picture that the first column is."""


DECODERS: dict[str, Callable[[Encoded, Region], Decoded]] = {
    "pil": _decode_region_by_pillow,
    "torchvision": partial(_decode_whole, decode_torchvision),
    "turbo": partial(_decode_whole, decode_turbo),
}
"""Decoders of ordinary JPEGs by name."""


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
        result = ChunkResult(len(ids))
        encoded = self._read(positions, result)
        self._load_ordinary(epoch, ids, encoded, out, result)
        for index, data in encoded.items():
            self._load_by_reference(epoch, int(positions[index]), ids[index : index + 1], data, index, out, result)
        if self.recipe.callables:
            self._call_user(epoch, positions, ids, out, {index for index, _, _ in result.failed})
        result.load_s = time.perf_counter() - started
        return result

    def _read(self, positions: NDArray[np.int64], result: ChunkResult) -> dict[int, Encoded]:
        encoded: dict[int, Encoded] = {}
        for index, position in enumerate(positions.tolist()):
            try:
                encoded[index] = self.source.read(position)
            except SourceError as error:
                result.failed.append((index, self.source.where(position), error.found))
        return encoded

    def _load_ordinary(
        self,
        epoch: int,
        ids: NDArray[np.int64],
        encoded: dict[int, Encoded],
        out: NDArray[np.uint8],
        result: ChunkResult,
    ) -> None:
        """Load what fast decoders take and drop it from `encoded`; count by reason what they leave to the reference."""
        indices = np.fromiter(encoded, np.int64, len(encoded))
        files = locate_files(list(encoded.values()))
        refusals = files.headers["refusal"]
        counted = self.decoder != "pil"  # for Pillow the reference is no fallback
        if counted:
            result.fallbacks.update(REFUSALS[code] for code in refusals[refusals != 0].tolist())
        taken = np.flatnonzero(refusals == 0)
        indices, files = indices[taken], files.take(taken)
        headers = files.headers
        turns = headers["orientation"] if self.orientation == "apply" else np.ones(len(indices), np.int64)
        upright = upright_sizes(headers["width"], headers["height"], turns)
        geometry = plan_geometry(self.recipe, self.seed, epoch, ids[indices], *upright)
        needed = needed_windows(geometry)
        stored = stored_windows(needed, turns, headers["width"], headers["height"])
        parts = cut_to_windows(files, stored)
        decode = DECODERS[self.decoder]
        for row, index in enumerate(indices.tolist()):
            part = parts[row]
            top, left, height, width = stored[row].tolist()
            try:
                picture = decode(part.data, (top - part.top, left - part.left, height, width))
            except DecodeError as error:
                if counted:
                    result.fallbacks[error.found] += 1
                continue  # the reference has the last word
            pixels, origin = picture.pixels, (part.top + picture.top, part.left + picture.left)
            if turns[row] != 1:
                y, x = top - origin[0], left - origin[1]
                pixels = orient(pixels[y : y + height, x : x + width], int(turns[row]))
                origin = int(needed[row, 0]), int(needed[row, 1])
            resize(pixels, origin, geometry, row, out[index])
            del encoded[index]

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
            picture = decode_reference(data)
            turn = reference_size(data).orientation if self.orientation == "apply" else 1
        except DecodeError as error:
            result.failed.append((index, self.source.where(position), error.found))
            return
        picture = orient(picture, turn)
        height, width = picture.shape[:2]
        geometry = plan_geometry(self.recipe, self.seed, epoch, sample_id, np.array([width]), np.array([height]))
        resize(picture, (0, 0), geometry, 0, out[index])

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
class _Part:
    """What is decoded of one file: a cut, or the whole."""

    data: Encoded
    """An ordinary JPEG."""
    top: int
    """Row of the stored picture that its first row is."""
    left: int
    """Column of the stored picture that its first column is."""


def cut_to_windows(files: Files, windows: NDArray[np.int64]) -> list[_Part]:
    """Cut crop-ready files to their windows; files that are not crop-ready stay whole and are not copied.

    Args:
        files: n files with readable headers.
        windows: (n, 4) top, left, height, width in stored pixels.
    """
    plans = plan_cuts(files, windows)
    ready = np.flatnonzero(plans["outcome"] == CUT)
    parts = [_Part(data, 0, 0) for data in files.buffers]
    if len(ready):
        ends = np.cumsum(plans["bytes"][ready])
        memory = np.empty(int(ends[-1]), np.uint8)
        starts = ends - plans["bytes"][ready]
        write_cuts(files.take(ready), plans[ready], memory, starts)
        view = memory.data
        bounds = zip(ready.tolist(), starts.tolist(), ends.tolist(), strict=True)
        for row, start, end in bounds:
            parts[row] = _Part(view[start:end], int(plans["top"][row]), int(plans["left"][row]))
    return parts


def resize(
    picture: NDArray[np.uint8], origin: tuple[int, int], geometry: Geometry, row: int, out: NDArray[np.uint8]
) -> None:
    """Crop, resize and mirror one picture by one row of a geometry.

    Args:
        picture: (h, w, 3) uint8, upright: the picture or a part of it.
        origin: (row, column) of the upright picture at which `picture` begins.
        geometry: Of n pictures.
        row: Which of them this is.
        out: (H, W, 3) uint8. Written.
    """
    low, high, full, offset = (a[row].tolist() for a in (geometry.low, geometry.high, geometry.full, geometry.offset))
    height, width = geometry.output_size
    rows = Axis(low[0], high[0], full[0], offset[0], height)
    columns = Axis(low[1], high[1], full[1], offset[1], width)
    resample_into(picture, origin, rows, columns, out, flip=bool(geometry.flips[row]))
