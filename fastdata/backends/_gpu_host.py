"""The host's part of decoding on a GPU: read, look at, cut and lay out JPEGs; load what no GPU decoder must see."""

from __future__ import annotations

import contextlib
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from fastdata.backends._gpu_resize import describe_decoded
from fastdata.backends._samples import SampleLoader
from fastdata.batch import Skipped
from fastdata.decode import stored_windows
from fastdata.errors import SourceError
from fastdata.geometry import needed_windows, plan_geometry, upright_sizes
from fastdata.jpeg import REFUSALS
from fastdata.jpeg_cut import locate_files, plan_cuts, unsample_gray, write_cuts
from fastdata.plan import StepPlan
from fastdata.sources import Encoded, IndexedSource, read_one_by_one
from fastdata.spec import PipelineSpec


@dataclass(frozen=True)
class Prepared:
    """Some samples of a step as the host prepared them; places count from the step's first sample."""

    taken: NDArray[np.int64]
    """(m,) places of what the decoder gets."""
    jpegs: tuple[torch.Tensor, ...]
    """(m) of (bytes,) uint8, cut or whole."""
    boxes: NDArray[np.int64]
    """(m, 4) top, left, height, width of each JPEG within the stored picture."""
    records: NDArray[np.int64]
    """(m, fields) from `describe_decoded`."""
    finished: Finished
    """What the reference loaded instead."""
    fallbacks: Counter[str]
    """Samples that the reference loaded, by reason."""
    memory: torch.Tensor
    """What `jpegs` point into; may be written again when they are decoded."""


@dataclass(frozen=True)
class Finished:
    """Samples that the reference loaded."""

    pictures: NDArray[np.uint8]
    """(k, H, W, 3) in their final size."""
    places: NDArray[np.int64]
    """(k,) places in the step."""
    failed: tuple[tuple[int, Skipped], ...] = ()
    """(place, what is reported) of samples that nothing can load."""


class HostStage:
    """Prepares samples for the decoder. May be used by several threads at once."""

    def __init__(self, source: IndexedSource, spec: PipelineSpec, *, pin_memory: bool) -> None:
        """Allocate nothing yet.

        Args:
            source: Where encoded pictures come from.
            spec: What is asked for.
            pin_memory: Whether encoded pictures lie in page-locked memory.
        """
        self._source = source
        self._spec = spec
        self._pinned = pin_memory
        self._reference = SampleLoader(source, spec.recipe, spec.seed, spec.orientation, "pil")
        self._memory: deque[torch.Tensor] = deque()
        self._refused: dict[int, str] = {}

    def prepare(self, step: StepPlan, start: int, stop: int) -> tuple[Prepared, float]:
        """Read, look at and cut the samples of some places of a step; return them, and the seconds it took."""
        started = time.perf_counter()
        encoded, unreadable = self._read(step, start, stop)
        files = locate_files(encoded)
        refusals = files.headers["refusal"]
        reasons = {place: REFUSALS[code] for place, code in enumerate(refusals.tolist(), start) if code}
        for place, sample_id in enumerate(step.ids[start:stop].tolist(), start):
            if sample_id in self._refused:
                reasons.setdefault(place, self._refused[sample_id])
        for place in unreadable:
            reasons.pop(place, None)
        taken = np.setdiff1d(np.arange(start, stop), [*reasons, *unreadable]).astype(np.int64)
        files = files.take(taken - start)
        headers, ids = files.headers, step.ids[taken]
        widths, heights = headers["width"], headers["height"]
        turns = headers["orientation"] if self._spec.orientation == "apply" else np.ones(len(taken), np.int64)
        upright = upright_sizes(widths, heights, turns)
        geometry = plan_geometry(self._spec.recipe, self._spec.seed, step.epoch, ids, *upright)
        plans = plan_cuts(files, stored_windows(needed_windows(geometry), turns, widths, heights))
        boxes = np.stack([plans[name] for name in ("top", "left", "height", "width")], axis=1)
        sizes = plans["bytes"]
        ends = np.cumsum(sizes)
        total = int(ends[-1]) if len(ends) else 0
        memory = self._take_memory(total)
        write_cuts(files, plans, memory.numpy()[:total], ends - sizes)
        unsample_gray(files, plans, memory.numpy()[:total], ends - sizes)
        jpegs = memory[:total].split(sizes.tolist()) if total else ()
        records = describe_decoded(geometry, boxes, turns, widths, heights)
        finished, fallbacks = self.finish(step, reasons)
        finished = Finished(finished.pictures, finished.places, (*unreadable.items(), *finished.failed))
        prepared = Prepared(taken, jpegs, boxes, records, finished, fallbacks, memory)
        return prepared, time.perf_counter() - started

    def finish(self, step: StepPlan, reasons: dict[int, str]) -> tuple[Finished, Counter[str]]:
        """Load samples by the reference; return them, and those that it could load by reason.

        Args:
            step: Their step.
            reasons: Why, by place in the step.
        """
        places = np.array(sorted(reasons), np.int64)
        pictures = np.empty((len(places), *self._spec.recipe.output_size, 3), np.uint8)
        if not len(places):
            return Finished(pictures, places), Counter()
        result = self._reference.load(step.epoch, step.positions[places], step.ids[places], pictures)
        failed = {
            int(places[index]): self._skipped(step, int(places[index]), reason) for index, _, reason in result.failed
        }
        kept = np.setdiff1d(np.arange(len(places)), [index for index, _, _ in result.failed]).astype(np.int64)
        fallbacks = Counter(reason for place, reason in reasons.items() if place not in failed)
        return Finished(pictures[kept], places[kept], tuple(failed.items())), fallbacks

    def refuse(self, step: StepPlan, reasons: dict[int, str]) -> None:
        """Keep samples from the decoder from now on: it failed on them."""
        self._refused.update((int(step.ids[place]), reason) for place, reason in reasons.items())

    def give_back(self, prepared: Sequence[Prepared]) -> None:
        """Reuse the memory of what is decoded."""
        self._memory.extend(part.memory for part in prepared)

    def clear(self) -> None:
        """Free the memory."""
        self._memory.clear()

    def _read(self, step: StepPlan, start: int, stop: int) -> tuple[list[Encoded], dict[int, Skipped]]:
        encoded: list[Encoded] = []
        unreadable: dict[int, Skipped] = {}
        # One by one: the decoder reads these bytes later, when views of `read_many` may be overwritten.
        for place, found in enumerate(read_one_by_one(self._source, step.positions[start:stop]), start):
            if isinstance(found, SourceError):
                unreadable[place] = self._skipped(step, place, found.found)
                found = b""
            encoded.append(found)
        return encoded, unreadable

    def _skipped(self, step: StepPlan, place: int, reason: str) -> Skipped:
        return Skipped(int(step.ids[place]), self._source.where(int(step.positions[place])), reason)

    def _take_memory(self, size: int) -> torch.Tensor:
        # Fresh memory would cost page faults, and page-locking it milliseconds, at each batch.
        with contextlib.suppress(IndexError):
            memory = self._memory.popleft()
            if len(memory) >= size:
                return memory
        return torch.empty(size + size // 4 + 1, dtype=torch.uint8, pin_memory=self._pinned)
