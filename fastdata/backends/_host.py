"""The engine of the host backends: batches are split into chunks, loaded by a pool, joined in order and sent on."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fastdata.backends._buffers import BufferPool, pinned_or_plain
from fastdata.backends._device import DeviceStage, HostBatch, InFlight
from fastdata.backends._epochs import EpochsInWork
from fastdata.backends._pools import CallerPool, Chunk, Pool, ProcessPool, Slot, ThreadPool
from fastdata.backends._samples import REDUCING_DECODERS, ChunkResult, SampleLoader
from fastdata.backends._transfer import check_device
from fastdata.batch import Skipped
from fastdata.errors import UsageError
from fastdata.pipeline import Delivery, EpochPlan, Pipeline, StepPlan
from fastdata.sources import IndexedSource
from fastdata.sources.stream import ShardStream
from fastdata.spec import Decode, Execution, HostOptions, PipelineSpec

_CHUNK_SAMPLES = 64  # at most, to spread fixed costs; a batch spreads over all workers
_ON_DEVICE = 2  # batches copied to the device ahead of the caller


@dataclass(frozen=True)
class _Job:
    """One step in work."""

    step: StepPlan
    slot: Slot
    futures: list[Future[ChunkResult]]

    def done(self) -> bool:
        return all(future.done() for future in self.futures)


class _StepSupply:
    """The steps of an epoch, as `fastdata.backends._epochs.Supply`."""

    def __init__(self, plan: EpochPlan) -> None:
        self._steps = iter(plan)
        self.exhausted = False

    def next(self, *, block: bool) -> StepPlan | None:  # noqa: ARG002 - a stream's steps come when they come
        step = next(self._steps, None)
        self.exhausted = step is None
        return step

    def stop(self) -> None:
        self._steps.close()


@dataclass
class _Costs:
    """Where the workers' time went in an epoch, for reports."""

    samples: int = 0
    load_s: float = 0.0
    held_s: float = 0.0
    read_s: float = 0.0

    def add(self, result: ChunkResult) -> None:
        self.samples += result.count
        self.load_s += result.load_s
        self.held_s += result.held_s
        self.read_s += result.read_s

    def describe(self) -> dict[str, float]:
        """Return seconds, summed over the workers, and microseconds for each image.

        ``load_s`` is all work, ``read_s`` reads in it, and ``python_s`` Python code outside of reads, decoders and
        kernels, when no other thread of the process could run any. ``python_us_per_image`` is the last for one image:
        a million divided by it bounds the images/s that threads can reach.
        """
        each_us = 1e6 / self.samples if self.samples else 0.0
        return {
            "load_s": self.load_s,
            "read_s": self.read_s,
            "python_s": self.held_s,
            "python_us_per_image": self.held_s * each_us,
        }


class HostPipeline(Pipeline):
    """Base of the backends that decode on the CPU; they differ in `decoder` and in what sources they read."""

    options_type: ClassVar[type] = HostOptions
    runs_callables = True
    decoder: ClassVar[str]
    """Which decoder of `fastdata.backends._samples` takes ordinary JPEGs."""

    def __init__(self, source: IndexedSource | ShardStream, spec: PipelineSpec, execution: Execution) -> None:
        """Check, and prepare workers and memory; see `Pipeline`.

        Raises:
            BackendUnavailableError: The device is a GPU that torch cannot use.
        """
        check_device(self.name, spec.device)
        super().__init__(source, spec, execution)
        self._stage: DeviceStage | None = None
        self._pool = self._make_pool()
        # Not where the caller itself would load the next epoch before it gets the end of this one, nor with streams,
        # which would hold the connections of two epochs.
        ahead = self._pool.workers > 0 and self.stream is None
        self._epochs: EpochsInWork[StepPlan, _Job] = EpochsInWork(
            _StepSupply, self._begin, self._give_up, self._following if ahead else None
        )
        self._costs = _Costs()

    def _batches(self, plan: EpochPlan) -> Generator[Delivery, None, None]:
        if self._stage is None:
            self._stage = DeviceStage(self.spec, pinned=self.execution.pin_memory)
        flights: deque[tuple[InFlight | None, Delivery]] = deque()
        self._costs = _Costs()
        room = self.execution.prefetch + 1 if self._pool.workers else 1
        lane = self._epochs.take(plan)
        completed = False
        try:
            while True:
                self._epochs.fill(lane, room)
                while lane.running and len(flights) < _ON_DEVICE and (not flights or lane.running[0].done()):
                    flights.append(self._send(*self._join(lane.running[0])))
                    lane.running.popleft()
                    self._epochs.fill(lane, room)
                if not flights:
                    completed = True
                    return
                flight, delivery = flights.popleft()
                batch = None if flight is None else self._stage.receive(flight)
                yield Delivery(batch, delivery.failed, delivery.fallbacks)
        finally:
            if not completed:
                self._epochs.abandon(lane)

    def _release(self) -> None:
        if self._stage is not None:
            self._stage.drain()
        if hasattr(self, "_epochs"):  # not where making the pool was refused
            self._epochs.drop_ahead()
            self._pool.close()

    def _details(self) -> dict[str, Any]:
        return {"pool": self._pool.name, "workers": self._pool.workers, **self._costs.describe()}

    def _make_pool(self) -> Pool:
        spec, execution = self.spec, self.execution
        options = execution.options or self.options_type()
        if options.decode == "fast" and self.decoder not in REDUCING_DECODERS:
            raise fast_refusal(self.name)
        decode: Decode = "fast" if options.decode == "fast" else "exact"
        loader = SampleLoader(self.source, spec.recipe, spec.seed, spec.orientation, self.decoder, decode)
        shape = (spec.batch_size, *spec.recipe.output_size, 3)
        in_work = execution.prefetch + 1
        # One buffer for each batch in work, in flight, with the caller, and one that the caller is about to drop.
        buffers = BufferPool(pinned_or_plain(shape, pinned=execution.pin_memory), keep=in_work + _ON_DEVICE + 2)
        processes = options.pool == "processes" or (options.pool == "auto" and bool(spec.recipe.callables))
        if options.pool == "threads" and spec.recipe.callables:
            raise UsageError(
                "HostOptions.pool",
                "threads with a Python callable in transform",
                '"auto" or "processes": threads share the random state that a callable draws from',
            )
        if execution.workers == 0:
            return CallerPool(loader, buffers)
        if processes:
            return ProcessPool(loader, buffers, execution.workers, shape, in_work, self)
        return ThreadPool(loader, buffers, execution.workers, self)

    def _following(self, plan: EpochPlan) -> EpochPlan:
        return self._plan(plan.epoch + 1, 0)

    def _begin(self, step: StepPlan) -> _Job:
        slot = self._pool.take_slot()
        count = len(step.ids)
        share = -(-count // max(1, self._pool.workers))
        size = max(1, min(_CHUNK_SAMPLES, share))
        chunks = [_chunk(step, at, min(at + size, count)) for at in range(0, count, size)]
        return _Job(step, slot, [self._pool.submit(chunk, slot) for chunk in chunks])

    def _give_up(self, jobs: Sequence[_Job]) -> None:
        """Stop work on steps that nobody will ask for; their memory may be reused only when no worker writes to it."""
        wait([future for job in jobs for future in job.futures if not future.cancel()])
        for job in jobs:
            self._pool.return_slot(job.slot)

    def _join(self, job: _Job) -> tuple[HostBatch | None, Delivery]:
        """Wait for a step and put its chunks together, without the samples that failed."""
        failed: list[tuple[int, Skipped]] = []
        fallbacks: Counter[str] = Counter()
        start = 0
        for future in job.futures:
            try:
                result = future.result()
            except BrokenProcessPool as exc:
                assert isinstance(self._pool, ProcessPool)
                raise self._pool.worker_died(exc) from exc
            failed.extend(
                (start + index, Skipped(int(job.step.ids[start + index]), where, reason))
                for index, where, reason in result.failed
            )
            fallbacks.update(result.fallbacks)
            self._costs.add(result)
            start += result.count
        images = self._pool.finish_slot(job.slot, start)
        ids, positions = job.step.ids, job.step.positions
        if failed:
            kept = np.setdiff1d(np.arange(start), [index for index, _ in failed])
            images, ids, positions = images[kept], ids[kept], positions[kept]
        delivery = Delivery(None, job.step.lost + tuple(skipped for _, skipped in failed), fallbacks)
        if not len(ids):
            return None, delivery
        labels = self._labels(job.step, positions)
        return HostBatch(images, labels, ids, job.step.epoch), delivery

    def _labels(self, step: StepPlan, positions: NDArray[np.int64]) -> NDArray[Any] | None:
        if self.stream is not None and step.held is not None:
            return take_rows(step.held.labels, positions) if self.stream.wants_labels else None
        return None if self.source.labels is None else take_rows(self.source.labels, positions)

    def _send(self, host: HostBatch | None, delivery: Delivery) -> tuple[InFlight | None, Delivery]:
        assert self._stage is not None
        return (None if host is None else self._stage.send(host)), delivery


def fast_refusal(backend: str) -> UsageError:
    """Return the error for ``decode="fast"`` on a backend whose decoder cannot reduce."""
    return UsageError(
        "HostOptions.decode",
        f'"fast" with backend="{backend}", which cannot reduce while it decodes',
        'decode="exact"',
        'Or use backend="pil", or "webdataset" on shards.',
    )


def _chunk(step: StepPlan, start: int, stop: int) -> Chunk:
    held = None if step.held is None else step.held.part(start, stop)
    return Chunk(step.epoch, step.positions[start:stop], step.ids[start:stop], start, held)


def take_rows(labels: NDArray[Any], positions: NDArray[np.int64]) -> NDArray[Any]:
    """Return the labels of some positions as fresh memory, (n,) or (n, k)."""
    return np.ascontiguousarray(labels[positions])
