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
from fastdata.errors import BackendUnavailableError, WorkerError
from fastdata.pipeline import Availability, Delivery, EpochPlan, Pipeline
from fastdata.sources import IndexedSource
from fastdata.spec import DaliOptions, Execution, PipelineSpec

if TYPE_CHECKING:
    from fastdata.backends._dali_feed import Feed
    from fastdata.backends._dali_feeder import Feeder
    from fastdata.backends._dali_graph import DaliGraph, GraphError

_GPU_DECODE_THREADS = 4
"""Beside the JPEG engines of an H200, more threads cost CPU and bring nothing; fewer starve the rest of the decode."""
_RETRIES = 3
"""Attempts to load a batch on which DALI failed; in the last one the reference decodes all of it."""


class DaliPipeline(Pipeline):
    """Loads pictures with DALI.

    A thread reads files, looks at each and lays batches out (`_dali_feed`). The caller's thread hands them to DALI,
    some ahead, and takes what DALI made: nothing else ever touches DALI, so that an error needs no hand-shake.
    """

    name = "dali"
    options_type = DaliOptions

    def __init__(self, source: IndexedSource, spec: PipelineSpec, execution: Execution) -> None:
        """Check that DALI works here and can do what is asked; see `Pipeline`.

        Raises:
            BackendUnavailableError: DALI, or the GPU that is asked for, does not work here.
        """
        _require_dali(spec.device)
        from fastdata.backends._dali_feed import FeedMaker  # imports numba and torch, which listing backends must not
        from fastdata.backends._dali_graph import GraphSettings
        from fastdata.backends._device import BatchFinish, check_device

        check_device(self.name, spec.device)
        super().__init__(source, spec, execution)
        self._options = execution.options or DaliOptions()
        unfinished = bool(spec.recipe.color) or spec.recipe.erasing is not None
        self._finish = BatchFinish(spec) if unfinished else None
        self._settings = GraphSettings(spec, self._options, self._decode_threads(), raw=unfinished)
        self._graph: DaliGraph | None = None
        self._maker = FeedMaker(source, spec, self._options.read_threads)
        self._epochs: EpochsInWork[Feed, Feed] = EpochsInWork(
            self._open_feeder, self._begin, self._give_up, lambda plan: self._plan(plan.epoch + 1, 0)
        )
        self._retired: deque[tuple[Any, Feed]] = deque()
        self._errors: list[str] = []

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
        if self._graph is not None:
            self._graph.close()
            self._graph = None
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
        workers = max(1, self.execution.workers)
        if self._options.decode_threads is not None:
            return self._options.decode_threads
        return workers if self.spec.device == "cpu" else min(workers, _GPU_DECODE_THREADS)

    def _open_feeder(self, plan: EpochPlan) -> Feeder:
        from fastdata.backends._dali_feeder import Feeder

        return Feeder(self._maker, plan, self.execution.prefetch + self._options.read_threads)

    def _begin(self, feed: Feed) -> Feed:
        """Hand a feed to DALI, unless it has nothing to decode."""
        from fastdata.backends._dali_graph import DaliGraph

        if self._graph is None:
            self._graph = DaliGraph(self._settings)
        if feed.inputs is not None:
            self._graph.start(feed.inputs)
        return feed

    def _deliver(self, lane: Lane[Feed, Feed]) -> Delivery:
        """Take the oldest run; where DALI failed on it, load it again without what DALI cannot take."""
        from fastdata.backends._dali_graph import GraphError

        feed = lane.running.popleft()
        pictures = None
        if feed.inputs is not None:
            assert self._graph is not None
            try:
                pictures = self._graph.receive()
            except GraphError as error:
                behind = [*lane.running, *self._epochs.running_ahead()]
                feed, pictures = self._retry(feed, behind, error)
        delivery = Delivery(None, feed.failed, feed.fallbacks)
        if pictures is None:
            return delivery
        batch = self._finished(feed, pictures)
        self._retire(feed)
        return replace(delivery, batch=batch)

    def _retry(self, feed: Feed, behind: list[Feed], error: GraphError) -> tuple[Feed, Any]:
        """Load a batch again after DALI failed on it, and start again what was behind it.

        DALI declares a pipeline that failed invalid, so a fresh one takes over. It names one sample at a time, which
        goes to the reference; where it names none, or goes on failing, the whole batch does, and DALI gets only PPM.
        """
        from fastdata.backends._dali_graph import GraphError

        assert self._graph is not None
        for attempt in range(_RETRIES):
            if not error.decoding:
                break
            self._errors.append(_short(error))
            named = [int(feed.kept[place]) for place in error.samples if place < len(feed.kept)]
            last = attempt == _RETRIES - 1
            suspects = feed.step.ids[named] if named and not last else feed.step.ids
            self._maker.refuse(suspects.tolist(), "DALI failed on it")
            self._graph.rebuild()
            self._maker.give_back(feed)
            feed = self._maker.make(feed.step)
            for waiting in (feed, *behind):
                self._begin(waiting)
            try:
                return feed, None if feed.inputs is None else self._graph.receive()
            except GraphError as again:
                error = again
        raise self._broken(feed, error) from error

    def _finished(self, feed: Feed, pictures: Any) -> Batch:
        import torch

        ids = feed.step.ids[feed.kept]
        if self._finish is not None:
            pictures = self._finish(pictures, ids, feed.step.epoch)
        if self.spec.device == "cpu" and self.execution.pin_memory:
            pictures = pictures.pin_memory()
        labels = None
        if self.source.labels is not None:
            found: NDArray[Any] = np.ascontiguousarray(self.source.labels[feed.step.positions[feed.kept]])
            labels = torch.from_numpy(found)
            if self.spec.device != "cpu":
                # From pageable memory the copy would wait for everything that the caller has queued on its stream.
                labels = labels.pin_memory().to(self.spec.device, non_blocking=True)
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

        if self._graph is None:
            return
        try:
            self._graph.drain()
        except GraphError as error:
            # Nobody asked for these pictures, so this is no fault to report; but DALI must start afresh.
            self._errors.append(_short(error))
            self._graph.close()
            self._graph = None
        for feed in feeds:
            self._maker.give_back(feed)

    def _broken(self, feed: Feed, error: GraphError) -> WorkerError:
        first = self.source.where(int(feed.step.positions[0]))
        return WorkerError(
            f"DALI on step {feed.step.number} of epoch {feed.step.epoch} (first sample: {first})",
            str(error),
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


def _short(error: GraphError) -> str:
    """Return DALI's own words without the traceback of the graph's definition."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "nvImageCodec" in line or ("ecode" in line and "File" not in line)]
    return (telling or lines or ["unknown"])[-1][:200]
