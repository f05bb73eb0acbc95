"""Backend "dali": NVIDIA DALI decodes, on the GPU with its JPEG engines or on the CPU, and keeps everybody's contract.

The samples, windows and mirrors come from the plan and the draws, as everywhere; DALI does what it is best at.
"""

from __future__ import annotations

import importlib
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fastdata.backends._dali_probe import describe_dali, gpu_fault
from fastdata.backends._epochs import EpochsInWork, Lane
from fastdata.batch import Batch
from fastdata.errors import BackendUnavailableError, UsageError, WorkerError
from fastdata.pipeline import Availability, Delivery, EpochPlan, Pipeline
from fastdata.sources import IndexedSource
from fastdata.spec import DaliOptions, Execution, PipelineSpec

if TYPE_CHECKING:
    from fastdata.backends._dali_feed import Feed
    from fastdata.backends._dali_feeder import Feeder
    from fastdata.backends._dali_graph import GraphError

_GPU_DECODE_THREADS = 4
"""Beside the JPEG engines of an H200, more threads cost CPU and bring nothing; fewer starve the rest of the decode."""
_FOUND_ALONE = 4
"""Samples found at most by giving DALI each of a failed batch alone; each of them costs a fresh DALI pipeline."""
_FAILED = "DALI failed on it"
_FAILED_BATCH = "DALI failed on its batch"


class DaliPipeline(Pipeline):
    """Loads pictures with DALI.

    `workers` are DALI's decode threads: as many as asked for where the CPU decodes, at most 4 beside a GPU, and
    ``DaliOptions(decode_threads=...)`` sets another number. ``DaliOptions(read_threads=...)`` more read files and lay
    batches out. ``report().details`` holds both numbers as they are.

    The read threads look at each file too (`_dali_feed`). The caller's thread hands batches to DALI, some ahead, and
    takes what DALI made: nothing else ever touches DALI, so that an error needs no hand-shake.
    """

    name = "dali"
    options_type = DaliOptions

    def __init__(self, source: IndexedSource, spec: PipelineSpec, execution: Execution) -> None:
        """Check that DALI works here and can do what is asked; see `Pipeline`.

        Raises:
            BackendUnavailableError: DALI, or the GPU that is asked for, does not work here.
            UsageError: No workers; or as in `Pipeline`.
        """
        _require_dali(spec.device)
        from fastdata.backends._dali_feed import FeedMaker  # imports numba and torch, which listing backends must not
        from fastdata.backends._dali_graph import DaliGraph, GraphSettings
        from fastdata.backends._finish import BatchFinish
        from fastdata.backends._transfer import check_device

        check_device(self.name, spec.device)
        if execution.workers == 0:
            raise UsageError(
                "workers",
                '0 with backend="dali", which never decodes in the calling thread',
                "a number of decode threads >= 1",
                'Pass workers=1, or load in the calling thread with backend="pil".',
            )
        super().__init__(source, spec, execution)
        self._options = execution.options or DaliOptions()
        unfinished = bool(spec.recipe.color) or spec.recipe.erasing is not None
        self._finish = BatchFinish(spec) if unfinished else None
        self._settings = GraphSettings(spec, self._options, self._decode_threads(), raw=unfinished)
        self._graph = DaliGraph(self._settings)
        self._maker = FeedMaker(source, spec, self._options.read_threads, self)
        self._epochs: EpochsInWork[Feed, Feed] = EpochsInWork(
            self._open_feeder, self._begin, self._give_up, lambda plan: self._plan(plan.epoch + 1, 0)
        )
        self._retired: deque[tuple[Any, Feed]] = deque()
        self._errors: list[str] = []
        self._suspects: dict[int, frozenset[int]] = {}

    @classmethod
    def availability(cls) -> Availability:
        """Say whether DALI works here, on which devices, and what stands in the way."""
        works, reason, remedy = describe_dali()
        return Availability(cls.name, works, reason, remedy)

    def _batches(self, plan: EpochPlan) -> Generator[Delivery, None, None]:
        from fastdata.backends._dali_feed import FeedCosts

        self._maker.costs = FeedCosts()
        self._errors = []
        lane = self._epochs.take(plan)
        completed = False
        try:
            while True:
                self._epochs.fill(lane, self._options.queue_depth)
                if not lane.running:
                    completed = True
                    return
                yield self._deliver(lane)
        finally:
            if not completed:  # DALI gives its runs in order, so those of the next epoch cannot stay behind these
                self._epochs.abandon(lane, and_ahead=True)

    def _release(self) -> None:
        self._epochs.drop_ahead()
        self._graph.close()
        self._retired.clear()
        self._maker.close()

    def _details(self) -> dict[str, Any]:
        costs = self._maker.costs
        batches = max(1, costs.batches)
        return {
            "decode_threads": self._settings.threads,
            "read_threads": self._options.read_threads,
            "feed_python_ms_per_batch": 1e3 * costs.python_s / batches,
            "feed_kernels_ms_per_batch": 1e3 * costs.kernels_s / batches,
            "dali_errors": list(self._errors),
        }

    def _decode_threads(self) -> int:
        workers = self.execution.workers
        if self._options.decode_threads is not None:
            return self._options.decode_threads
        return workers if self.spec.device == "cpu" else min(workers, _GPU_DECODE_THREADS)

    def _open_feeder(self, plan: EpochPlan) -> Feeder:
        from fastdata.backends._dali_feeder import Feeder

        return Feeder(self._maker, plan, self.execution.prefetch + self._options.read_threads)

    def _begin(self, feed: Feed) -> Feed:
        """Hand a feed to DALI, unless it has nothing to decode."""
        if feed.inputs is not None:
            self._graph.start(feed.inputs)
        return feed

    def _deliver(self, lane: Lane[Feed, Feed]) -> Delivery:
        """Take the oldest run; where DALI failed on it, load it again without what DALI cannot take."""
        feed = lane.running.popleft()
        pictures, error = self._receive(feed)
        if error is not None:
            feed, pictures = self._load_again(feed, [*lane.running, *self._epochs.running_ahead()], error)
        delivery = Delivery(None, feed.failed, feed.fallbacks)
        if pictures is None:
            return delivery
        batch = self._finished(feed, pictures)
        self._retire(feed)
        return replace(delivery, batch=batch)

    def _receive(self, feed: Feed) -> tuple[Any, GraphError | None]:
        """Return what DALI made of the oldest run, or what it failed of where the pictures may be at fault.

        After a failure DALI is closed, and its memory free: it declares a pipeline that failed invalid, and the next
        start builds a fresh one.

        Raises:
            WorkerError: DALI failed of something else, such as memory.
        """
        from fastdata.backends._dali_graph import GraphError

        if feed.inputs is None:
            return None, None
        try:
            return self._graph.receive(), None
        except GraphError as failure:
            error = failure.with_traceback(None)  # its frames may hold what DALI made
        self._graph.close()
        if not error.by_pictures:
            raise self._broken(feed, error) from error
        return None, error

    def _load_again(self, feed: Feed, behind: list[Feed], error: GraphError) -> tuple[Feed, Any]:
        """Load a batch again after DALI failed on it, and start again what was behind it.

        DALI names at most one sample. It goes to the reference from now on, and DALI gets the batch again. Where DALI
        names none, or fails once more, the reference loads the whole batch, this once, and DALI gets only PPM.

        Raises:
            WorkerError: It failed on PPM too, or of something that is no picture's fault.
        """
        for whole in (False, True) if error.samples else (True,):
            named = [int(feed.step.ids[feed.kept[place]]) for place in error.samples if place < len(feed.kept)]
            self._errors.append(error.cause)
            self._maker.refuse(named, _FAILED)
            again = self._maker.make(feed.step, by_reference=_FAILED_BATCH if whole else "")
            if whole and not named:
                self._maker.refuse(self._culprits(feed, again), _FAILED)
            self._maker.give_back(feed)
            feed = again
            for waiting in (feed, *behind):
                self._begin(waiting)
            pictures, failure = self._receive(feed)
            if failure is None:
                return feed, pictures
            error = failure
        raise self._broken(feed, error) from error

    def _culprits(self, feed: Feed, by_reference: Feed) -> list[int]:
        """Return the ids of samples that DALI must not get again, after it failed on a feed and named none.

        They are those that the reference cannot load either; else those that DALI fails on alone; else those that have
        been in another failed batch before, with other companions. None where the feed was made before a sample in it
        was found elsewhere.
        """
        if by_reference.fallbacks[_FAILED] > feed.fallbacks[_FAILED]:
            return []
        ids = feed.step.ids[feed.kept].tolist()
        culprits = sorted({skipped.sample_id for skipped in by_reference.failed}.intersection(ids))
        culprits = culprits or [ids[place] for place in self._fail_alone(feed)]
        if culprits:
            return culprits
        batch = frozenset(ids)
        twice = [sample_id for sample_id in ids if self._suspects.get(sample_id, batch) != batch]
        self._suspects.update(dict.fromkeys(ids, batch))
        return twice

    def _fail_alone(self, feed: Feed) -> list[int]:
        """Return the places in a feed of samples on which DALI fails alone; at most `_FOUND_ALONE`."""
        places: list[int] = []
        if feed.inputs is None:
            return places
        for place in range(len(feed.kept)):
            self._graph.start(feed.inputs.alone(place))
            if self._receive(feed)[1] is not None:
                places.append(place)
                if len(places) == _FOUND_ALONE:
                    break
        return places

    def _finished(self, feed: Feed, pictures: Any) -> Batch:
        import torch

        from fastdata.backends._transfer import to_device

        ids = feed.step.ids[feed.kept]
        if self._finish is not None:
            pictures = self._finish(pictures, ids, feed.step.epoch)
        labels = None
        if self.source.labels is not None:
            found: NDArray[Any] = np.ascontiguousarray(self.source.labels[feed.step.positions[feed.kept]])
            labels = to_device(torch.from_numpy(found), torch.device(self.spec.device))
        if self.spec.device == "cpu" and self.execution.pin_memory:
            pictures = pictures.pin_memory()
            labels = None if labels is None else labels.pin_memory()
        return Batch(pictures, labels, torch.from_numpy(np.ascontiguousarray(ids)))

    def _retire(self, feed: Feed) -> None:
        """Reuse the memory of feeds that DALI has read. On a GPU its copies may still be queued when a batch is out."""
        if self.spec.device == "cpu":
            self._maker.give_back(feed)
            return
        import torch

        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(self.spec.device))
        self._retired.append((done, feed))
        while self._retired and self._retired[0][0].query():
            self._maker.give_back(self._retired.popleft()[1])

    def _give_up(self, feeds: Sequence[Feed]) -> None:
        """Wait for runs that nobody will take, so that their memory may be reused."""
        from fastdata.backends._dali_graph import GraphError

        try:
            self._graph.drain()
        except GraphError as error:
            # Nobody asked for these pictures, so this is no fault to report; but DALI must start afresh.
            self._errors.append(error.cause)
            self._graph.close()
        for feed in feeds:
            self._maker.give_back(feed)

    def _broken(self, feed: Feed, error: GraphError) -> WorkerError:
        first = self.source.where(int(feed.step.positions[0]))
        return WorkerError(
            f"DALI on step {feed.step.number} of epoch {feed.step.epoch} (first sample: {first})",
            error.cause,
            "a batch of decoded pictures",
            "If memory ran out, use a smaller batch size or DaliOptions(queue_depth=1).",
        )


def _require_dali(device: str) -> None:
    works, reason, remedy = describe_dali()
    if not works:
        raise BackendUnavailableError("dali", reason, "an installed NVIDIA DALI", remedy)
    if device != "cpu":
        fault = gpu_fault()
        if fault is not None:
            raise BackendUnavailableError(
                f'dali on device="{device}"', fault.reason, "a GPU that DALI can use", fault.remedy
            )
    importlib.import_module("nvidia.dali")
