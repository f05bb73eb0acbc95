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
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace

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
from fastdata.jpeg_cut import CUT, NOT_READY, Files, plan_cuts, unsample_gray, write_cuts
from fastdata.pipeline import StepPlan
from fastdata.sources import IndexedSource, OneByOne
from fastdata.spec import PipelineSpec
from fastdata.threads import WorkerThreads

_ROW_ALIGNMENT = 64
_PADDING_LIMIT = 3
"""Rows of equal length may take this many times the bytes of the pictures; beyond, DALI gets a list (about 5 us a
sample instead of 1), so that one large file does not blow the batch up."""
_SMALL_BYTES = 2**20
"""Up to this size rows are taken whatever they waste."""
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


@dataclass
class FeedCosts:
    """Where the feeding threads' time goes, summed over an epoch."""

    batches: int = 0
    """Batches made."""
    python_s: float = 0.0
    """User CPU seconds of Python code, an upper bound for how long feeding held the interpreter."""
    kernels_s: float = 0.0
    """CPU seconds in compiled code that does not hold the interpreter: headers, cuts, copies."""

    @contextlib.contextmanager
    def kernel(self) -> Iterator[None]:
        """Count the CPU time of the block, which runs compiled code."""
        started_s = time.thread_time()
        yield
        self.kernels_s += time.thread_time() - started_s

    def __iadd__(self, other: FeedCosts) -> FeedCosts:
        """Add another sum."""
        self.batches += other.batches
        self.python_s += other.python_s
        self.kernels_s += other.kernels_s
        return self


class FeedMaker:
    """Turns steps into feeds, on its own threads and the caller's. May be used by several threads at once."""

    def __init__(self, source: IndexedSource, spec: PipelineSpec, threads: int, owner: object = None) -> None:
        """Start no thread yet; they come with the first step.

        Args:
            source: Where encoded pictures come from.
            spec: What is asked for.
            threads: Threads that make feeds.
            owner: As of `WorkerThreads`.
        """
        self.costs = FeedCosts()
        self._source = source
        self._spec = spec
        self._reference = SampleLoader(OneByOne(source), spec.recipe, spec.seed, spec.orientation, "pil")
        self._lock = threading.Lock()  # of `costs`
        self._pool = WorkerThreads(threads, "fastdata-dali-read", owner)
        self._buffers: deque[NDArray[np.uint8]] = deque()
        self._refused: dict[int, str] = {}

    def refuse(self, ids: Iterable[int], reason: str) -> None:
        """Send samples to the reference from now on.

        Args:
            ids: Sample ids on which DALI failed.
            reason: Counted as the reason.
        """
        self._refused.update((sample_id, reason) for sample_id in ids)

    def begin(self, step: StepPlan) -> Future[Feed]:
        """Start making a step's feed on one of the threads."""
        return self._pool.submit(self.make, step)

    def make(self, step: StepPlan, *, by_reference: str = "") -> Feed:
        """Read a step and lay it out, in the calling thread.

        One thread makes a whole feed, and others make the next ones meanwhile: parts of one batch spread over threads
        would hand the interpreter around dozens of times a batch, which on an H200 capped feeding at 17 k img/s.

        Args:
            step: The step.
            by_reference: Why the reference shall load all of it, this once; "" where nothing speaks against DALI.

        Raises:
            Exception: What a defect in a source raised; `SourceError` of single samples goes into ``Feed.failed``.
        """
        costs = FeedCosts(batches=1)
        started_s = _user_s()
        feed = self._lay_out(step, self._read(step.positions, costs), by_reference, costs)
        costs.python_s = max(0.0, _user_s() - started_s - costs.kernels_s)
        with self._lock:
            self.costs += costs
        return feed

    def give_back(self, feed: Feed) -> None:
        """Reuse the memory of a feed, when DALI is done with it."""
        if feed.buffer is not None:
            self._buffers.append(feed.buffer)

    def close(self) -> None:
        """End the threads and free the memory. Idempotent."""
        self._pool.shutdown()
        self._buffers.clear()

    def _read(self, positions: NDArray[np.int64], costs: FeedCosts) -> Files:
        encoded = self._source.read_many(positions)
        addresses, lengths = locate([b"" if isinstance(item, SourceError) else item for item in encoded])
        with costs.kernel():
            headers = read_headers_at(addresses, lengths)
        return Files(tuple(encoded), addresses, lengths, headers)

    def _lay_out(self, step: StepPlan, files: Files, by_reference: str, costs: FeedCosts) -> Feed:
        failed = {
            index: self._skipped(step, index, item.found)
            for index, item in enumerate(files.buffers)
            if isinstance(item, SourceError)
        }
        reasons = self._reasons(step, files.headers["refusal"], failed)
        if by_reference:
            reasons = {index: by_reference for index in range(len(step.ids)) if index not in failed} | reasons
        window, plans = self._cut(step, files, costs)
        refused = np.fromiter(reasons, np.int64, len(reasons))
        if len(refused):
            finished = [ppm(picture) for picture in self._load_by_reference(step, refused, failed)]
            files.addresses[refused], files.lengths[refused] = locate(finished)
            plans["outcome"][refused], plans["bytes"][refused] = NOT_READY, files.lengths[refused]
            files.headers["components"][refused] = 0  # no JPEG any more
            window = with_finished(window, refused, self._spec.recipe.output_size)
        fallbacks = Counter(reason for index, reason in reasons.items() if index not in failed)
        failures = tuple(failed[index] for index in sorted(failed))
        kept = np.arange(len(step.ids))
        if failed:
            kept = np.setdiff1d(kept, np.fromiter(failed, np.int64, len(failed)))
            if not len(kept):
                return Feed(step, kept, None, failures, fallbacks, None)
            files, plans = files.take(kept), plans[kept]
            window = GraphInputs(
                window.encoded,
                window.start[kept],
                window.shape[kept],
                window.region_start[kept],
                window.region_end[kept],
                window.mirror[kept],
            )
        rows, buffer = self._write(files, plans, costs)
        return Feed(step, kept, replace(window, encoded=rows), failures, fallbacks, buffer)

    def _reasons(self, step: StepPlan, refusals: NDArray[np.int64], failed: dict[int, Skipped]) -> dict[int, str]:
        """Return why samples go to the reference, by their place in the step."""
        reasons = {int(i): REFUSALS[refusals[i]] for i in np.flatnonzero(refusals) if int(i) not in failed}
        if self._refused:
            for index, sample_id in enumerate(step.ids.tolist()):
                if sample_id in self._refused and index not in failed:
                    reasons.setdefault(index, self._refused[sample_id])
        return reasons

    def _cut(self, step: StepPlan, files: Files, costs: FeedCosts) -> tuple[GraphInputs, NDArray[np.void]]:
        """Return the windows of all samples within what DALI gets of them, and the cuts of crop-ready files.

        The windows of refused files mean nothing yet.
        """
        spec, headers = self._spec, files.headers
        turns = headers["orientation"] if spec.orientation == "apply" else np.ones(len(headers), np.int64)
        stored_widths, stored_heights = np.maximum(1, headers["width"]), np.maximum(1, headers["height"])
        widths, heights = upright_sizes(stored_widths, stored_heights, turns)
        window = graph_windows(plan_geometry(spec.recipe, spec.seed, step.epoch, step.ids, widths, heights))
        wanted = np.concatenate([window.start, window.shape], axis=1).astype(np.int64)
        stored = stored_windows(wanted, turns, stored_widths, stored_heights)
        with costs.kernel():
            plans = plan_cuts(files, stored)
        if not (plans["outcome"] == CUT).any():
            return window, plans
        cuts = np.stack([plans[name] for name in ("top", "left", "height", "width")], axis=1)
        # Back to upright coordinates: the turn that undoes a turn, on a "stored" picture that is the upright one.
        origins = stored_windows(cuts, _UNDOING[turns], widths, heights)[:, :2]
        return replace(window, start=(window.start - origins).astype(np.int32)), plans

    def _load_by_reference(
        self, step: StepPlan, indices: NDArray[np.int64], failed: dict[int, Skipped]
    ) -> NDArray[np.uint8]:
        """Load samples in their final form: (m, H, W, 3) uint8. Notes those that cannot be loaded."""
        out = np.zeros((len(indices), *self._spec.recipe.output_size, 3), np.uint8)
        loaded = self._reference.load(step.epoch, step.positions[indices], step.ids[indices], out)
        for index, _, reason in loaded.failed:
            place = int(indices[index])
            failed[place] = self._skipped(step, place, reason)
        return out

    def _skipped(self, step: StepPlan, index: int, reason: str) -> Skipped:
        return Skipped(int(step.ids[index]), self._source.where(int(step.positions[index])), reason)

    def _write(
        self, files: Files, plans: NDArray[np.void], costs: FeedCosts
    ) -> tuple[NDArray[np.uint8] | list[NDArray[np.uint8]], NDArray[np.uint8]]:
        """Write pictures into reused memory, as equal rows where that wastes little, else one after the other."""
        lengths, n = plans["bytes"], len(plans)
        longest = -(-int(lengths.max()) // _ROW_ALIGNMENT) * _ROW_ALIGNMENT
        as_rows = n * longest <= max(_PADDING_LIMIT * int(lengths.sum()), _SMALL_BYTES)
        spaces = np.full(n, longest) if as_rows else -(-lengths // _ROW_ALIGNMENT) * _ROW_ALIGNMENT
        starts = np.cumsum(spaces) - spaces
        buffer = self._take_buffer(int(spaces.sum()))
        with costs.kernel():
            write_cuts(files, plans, buffer, starts, longest if as_rows else 0)
        unsample_gray(files, plans, buffer, starts)
        if as_rows:
            return buffer[: n * longest].reshape(n, longest), buffer
        return [buffer[o : o + m] for o, m in zip(starts.tolist(), lengths.tolist(), strict=True)], buffer

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
