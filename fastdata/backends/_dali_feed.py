"""What DALI is fed: the bytes of each batch laid out in one array, its windows and mirrors.

Every file is looked at here before DALI gets it. Crop-ready files are cut to their window on the way into the array.
What DALI must not take is loaded by the reference, in its final size, and travels at its place as a PPM; what nothing
can load is left out.
"""

from __future__ import annotations

import contextlib
import resource
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from fastdata._native import locate
from fastdata.backends._dali_graph import GraphInputs, ppm
from fastdata.backends._dali_windows import graph_windows, with_finished
from fastdata.backends._samples import SampleLoader
from fastdata.batch import Skipped
from fastdata.decode import stored_windows
from fastdata.errors import SourceError
from fastdata.geometry import plan_geometry, upright_sizes
from fastdata.jpeg import REFUSALS, read_headers_at
from fastdata.jpeg_cut import CUT, NOT_READY, Files, plan_cuts, write_cuts
from fastdata.pipeline import StepPlan
from fastdata.sources import Encoded, IndexedSource
from fastdata.spec import PipelineSpec

_ROW_ALIGNMENT = 64
_PADDING_LIMIT = 3
"""Rows of equal length may take this many times the bytes of the pictures; beyond, DALI gets a list (about 5 us a
sample instead of 1), so that one large file does not blow the batch up."""
_SMALL_BYTES = 2**20
"""Up to this size rows are taken whatever they waste."""
_CHUNK_SAMPLES = 32
_UNDOING = np.array([1, 1, 2, 3, 4, 5, 8, 7, 6])
"""EXIF orientation that undoes each orientation: quarter turns undo each other, the rest undo themselves."""


@dataclass(frozen=True)
class Feed:
    """One step, ready for DALI."""

    step: StepPlan
    """The step as planned."""
    kept: NDArray[np.int64]
    """(n,) places in the step of the samples that are fed, ascending."""
    inputs: GraphInputs | None
    """What the graph gets, or None where nothing is left."""
    failed: tuple[Skipped, ...]
    """Samples that nothing can load."""
    fallbacks: Counter[str]
    """Samples that the reference loaded, by reason."""
    buffer: NDArray[np.uint8] | None
    """The memory in which the pictures lie; goes back to the maker when DALI is done with it."""


@dataclass(frozen=True)
class ReadSamples:
    """Some samples of a step as they lie in the source."""

    encoded: list[Encoded | SourceError]
    """Bytes, or why they cannot be read."""
    addresses: NDArray[np.int64]
    """(m,) where the bytes lie; valid as long as `encoded` lives."""
    lengths: NDArray[np.int64]
    """(m,) bytes; 0 where there are none."""
    headers: NDArray[np.void]
    """(m,) of `fastdata.jpeg.HEADER_DTYPE`."""


@dataclass
class FeedCosts:
    """Where the feeding threads' time goes, summed over an epoch."""

    batches: int = 0
    """Batches made."""
    python_s: float = 0.0
    """User CPU seconds of Python code, an upper bound for how long feeding held the interpreter."""
    kernels_s: float = 0.0
    """CPU seconds in compiled code that does not hold the interpreter: headers, cuts, copies."""
    waited_s: float = 0.0
    """Seconds that the feeding thread waited for reads."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while numbers are added."""

    def add(self, *, batches: int = 0, python_s: float = 0.0, kernels_s: float = 0.0, waited_s: float = 0.0) -> None:
        """Add to the sums; from any thread."""
        with self.lock:
            self.batches += batches
            self.python_s += python_s
            self.kernels_s += kernels_s
            self.waited_s += waited_s


class FeedMaker:
    """Turns steps into feeds, on its own threads and the caller's. May be used by several threads at once."""

    def __init__(self, source: IndexedSource, spec: PipelineSpec, threads: int) -> None:
        """Start no thread yet; they come with the first step.

        Args:
            source: Where encoded pictures come from.
            spec: What is asked for.
            threads: Threads that read and copy.
        """
        self.costs = FeedCosts()
        self._source = source
        self._spec = spec
        self._reference = SampleLoader(source, spec.recipe, spec.seed, spec.orientation, "pil")
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="fastdata-dali-read")
        self._buffers: deque[NDArray[np.uint8]] = deque()
        self._refused: dict[int, str] = {}

    def refuse(self, ids: Iterable[int], reason: str) -> None:
        """Send samples to the reference from now on.

        Args:
            ids: Sample ids on which DALI failed.
            reason: Counted as the reason.
        """
        self._refused.update((sample_id, reason) for sample_id in ids)

    def read(self, step: StepPlan) -> list[Future[ReadSamples]]:
        """Start reading the samples of a step."""
        positions = step.positions.tolist()
        return [
            self._pool.submit(self._read_chunk, positions[at : at + _CHUNK_SAMPLES])
            for at in range(0, len(positions), _CHUNK_SAMPLES)
        ]

    def make(self, step: StepPlan, reads: Sequence[Future[ReadSamples]]) -> Feed:
        """Wait for the reads of a step and lay it out.

        Raises:
            Exception: What a defect in a source raised; `SourceError` of single samples goes into ``Feed.failed``.
        """
        started = time.perf_counter()
        wait(reads)
        waited_s = time.perf_counter() - started
        user_s = _user_s()
        feed = self._lay_out(step, [read.result() for read in reads])
        self.costs.add(batches=1, python_s=_user_s() - user_s, waited_s=waited_s)
        return feed

    def give_back(self, feed: Feed) -> None:
        """Reuse the memory of a feed, when DALI is done with it."""
        if feed.buffer is not None:
            self._buffers.append(feed.buffer)

    def close(self) -> None:
        """End the threads and free the memory. Idempotent."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._buffers.clear()

    def _read_chunk(self, positions: list[int]) -> ReadSamples:
        user_s = _user_s()
        encoded: list[Encoded | SourceError] = []
        for position in positions:
            try:
                encoded.append(self._source.read(position))
            except SourceError as error:
                encoded.append(error)
        addresses, lengths = locate([b"" if isinstance(item, SourceError) else item for item in encoded])
        started = time.thread_time()
        headers = read_headers_at(addresses, lengths)
        kernels_s = time.thread_time() - started
        self.costs.add(python_s=max(0.0, _user_s() - user_s - kernels_s), kernels_s=kernels_s)
        return ReadSamples(encoded, addresses, lengths, headers)

    def _lay_out(self, step: StepPlan, reads: list[ReadSamples]) -> Feed:
        encoded = [item for read in reads for item in read.encoded]
        files = Files(
            tuple(encoded),
            np.concatenate([read.addresses for read in reads]),
            np.concatenate([read.lengths for read in reads]),
            np.concatenate([read.headers for read in reads]),
        )
        failed = {
            index: self._skipped(step, index, item.found)
            for index, item in enumerate(encoded)
            if isinstance(item, SourceError)
        }
        reasons = self._reasons(step, files.headers["refusal"], failed)
        window, plans = self._cut(step, files)
        by_reference = np.fromiter(reasons, np.int64, len(reasons))
        if len(by_reference):
            finished = [ppm(picture) for picture in self._load_by_reference(step, by_reference, failed)]
            files.addresses[by_reference], files.lengths[by_reference] = locate(finished)
            plans["outcome"][by_reference], plans["bytes"][by_reference] = NOT_READY, files.lengths[by_reference]
            window = with_finished(window, by_reference, self._spec.recipe.output_size)
        kept = np.setdiff1d(np.arange(len(encoded)), np.fromiter(failed, np.int64, len(failed)))
        fallbacks = Counter(reason for index, reason in reasons.items() if index not in failed)
        failures = tuple(failed[index] for index in sorted(failed))
        if not len(kept):
            return Feed(step, kept, None, failures, fallbacks, None)
        rows, buffer = self._write(files, plans, kept)
        inputs = GraphInputs(
            rows,
            window.start[kept],
            window.shape[kept],
            window.region_start[kept],
            window.region_end[kept],
            window.mirror[kept],
        )
        return Feed(step, kept, inputs, failures, fallbacks, buffer)

    def _reasons(self, step: StepPlan, refusals: NDArray[np.int64], failed: dict[int, Skipped]) -> dict[int, str]:
        """Return why samples go to the reference, by their place in the step."""
        reasons = {int(i): REFUSALS[refusals[i]] for i in np.flatnonzero(refusals) if int(i) not in failed}
        if self._refused:
            for index, sample_id in enumerate(step.ids.tolist()):
                if sample_id in self._refused and index not in failed:
                    reasons.setdefault(index, self._refused[sample_id])
        return reasons

    def _cut(self, step: StepPlan, files: Files) -> tuple[GraphInputs, NDArray[np.void]]:
        """Return the windows of all samples within what DALI gets of them, and the cuts of crop-ready files.

        The windows of refused files mean nothing yet.
        """
        spec, headers = self._spec, files.headers
        turns = headers["orientation"] if spec.orientation == "apply" else np.ones(len(headers), np.int64)
        stored_widths, stored_heights = np.maximum(1, headers["width"]), np.maximum(1, headers["height"])
        widths, heights = upright_sizes(stored_widths, stored_heights, turns)
        window = graph_windows(plan_geometry(spec.recipe, spec.seed, step.epoch, step.ids, widths, heights))
        wanted = np.concatenate([window.start, window.shape], axis=1).astype(np.int64)
        started = time.thread_time()
        plans = plan_cuts(files, stored_windows(wanted, turns, stored_widths, stored_heights))
        self.costs.add(kernels_s=time.thread_time() - started)
        if not (plans["outcome"] == CUT).any():
            return window, plans
        cuts = np.stack([plans[name] for name in ("top", "left", "height", "width")], axis=1)
        # Back to upright coordinates: the turn that undoes a turn, on a "stored" picture that is the upright one.
        origins = stored_windows(cuts, _UNDOING[turns], widths, heights)[:, :2]
        return replace(window, start=(window.start - origins).astype(np.int32)), plans

    def _load_by_reference(
        self, step: StepPlan, indices: NDArray[np.int64], failed: dict[int, Skipped]
    ) -> NDArray[np.uint8]:
        """Load samples in their final form on all threads: (m, H, W, 3) uint8. Notes those that cannot be loaded."""
        out = np.zeros((len(indices), *self._spec.recipe.output_size, 3), np.uint8)
        positions, ids = step.positions[indices], step.ids[indices]
        share = -(-len(indices) // self._threads)
        chunks = range(0, len(indices), share)
        parts = [slice(at, at + share) for at in chunks]
        loads = [self._pool.submit(self._reference.load, step.epoch, positions[p], ids[p], out[p]) for p in parts]
        wait(loads)
        for at, load in zip(chunks, loads, strict=True):
            for index, _, reason in load.result().failed:
                place = int(indices[at + index])
                failed[place] = self._skipped(step, place, reason)
        return out

    def _skipped(self, step: StepPlan, index: int, reason: str) -> Skipped:
        return Skipped(int(step.ids[index]), self._source.where(int(step.positions[index])), reason)

    def _write(
        self, files: Files, plans: NDArray[np.void], kept: NDArray[np.int64]
    ) -> tuple[NDArray[np.uint8] | list[NDArray[np.uint8]], NDArray[np.uint8]]:
        """Write pictures into reused memory, as equal rows where that wastes little, else one after the other."""
        plans = plans[kept]
        lengths, n = plans["bytes"], len(kept)
        longest = -(-int(lengths.max()) // _ROW_ALIGNMENT) * _ROW_ALIGNMENT
        as_rows = n * longest <= max(_PADDING_LIMIT * int(lengths.sum()), _SMALL_BYTES)
        spaces = np.full(n, longest) if as_rows else -(-lengths // _ROW_ALIGNMENT) * _ROW_ALIGNMENT
        starts = np.cumsum(spaces) - spaces
        buffer = self._take_buffer(int(spaces.sum()))
        share = -(-n // self._threads)
        parts = [slice(at, at + share) for at in range(0, n, share)]
        padded = longest if as_rows else 0
        writes = [
            self._pool.submit(self._write_part, files.take(kept[p]), plans[p], buffer, starts[p], padded) for p in parts
        ]
        for written in writes:
            written.result()
        if as_rows:
            return buffer[: n * longest].reshape(n, longest), buffer
        return [buffer[o : o + m] for o, m in zip(starts.tolist(), lengths.tolist(), strict=True)], buffer

    def _write_part(
        self,
        files: Files,
        plans: NDArray[np.void],
        buffer: NDArray[np.uint8],
        starts: NDArray[np.int64],
        padded_bytes: int,
    ) -> None:
        started = time.thread_time()
        write_cuts(files, plans, buffer, starts, padded_bytes)
        self.costs.add(kernels_s=time.thread_time() - started)

    def _take_buffer(self, size: int) -> NDArray[np.uint8]:
        # Fresh memory would cost a page fault every 4 KiB, each batch.
        with contextlib.suppress(IndexError):
            buffer = self._buffers.popleft()
            if len(buffer) >= size:
                return buffer
        return np.empty(size + size // 8, np.uint8)


def _user_s() -> float:
    """Return this thread's user CPU seconds; system time, such as the copy in a read, does not hold the interpreter."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_utime
