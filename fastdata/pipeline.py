"""The `Pipeline`: the protocol that every backend shares, owned here once.

Epochs, length, splits, state, skips, reports, closing and the random state of `batch_transform` live in this class; a
backend has two methods, `_batches` and `_release`, and decides nothing about which samples come when.
"""

from __future__ import annotations

import copy
import sys
import time
import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast, final

from fastdata.batch import Batch, Report, Skipped
from fastdata.errors import FastDataError, SampleError, SkipBudgetError, StateError, UsageError
from fastdata.order import Steps, make_order
from fastdata.plan import EpochPlan as EpochPlan
from fastdata.plan import IndexedPlan as IndexedPlan
from fastdata.plan import StepPlan as StepPlan
from fastdata.plan import StreamPlan as StreamPlan
from fastdata.rng import STREAM_BATCH, scalar_key
from fastdata.sources import IndexedSource
from fastdata.sources.stream import ShardStream
from fastdata.spec import BufferShuffle, Execution, Labels, PipelineSpec
from fastdata.wording import counted

_STATE_VERSION = 2  # 1: fingerprints covered the number of samples and their ids alone


@dataclass(frozen=True)
class Delivery:
    """What a backend made of one step."""

    batch: Batch | None
    """The samples that could be loaded, in the step's order; None where none could."""
    failed: tuple[Skipped, ...] = ()
    """The others, with reasons. The pipeline raises or counts them, as the user asked."""
    fallbacks: Counter[str] = field(default_factory=Counter)
    """Samples that a fast decoder left to the reference decoder, by reason."""


@dataclass(frozen=True)
class Availability:
    """Whether a backend works on this machine."""

    name: str
    """The backend's name."""
    works: bool
    """Whether it can load pictures here."""
    reason: str = ""
    """Why it does not work, or what it does without (for example: no GPU, decodes on the CPU)."""
    remedy: str = ""
    """How to get it."""


class Pipeline(ABC):
    """Loads batches; what `fastdata.open_pipeline` returns.

    Iterate it as often as you like: each iteration is one epoch, a new one closes the one before. A backend subclasses
    this and keeps this contract:

    * `_batches` yields exactly one `Delivery` for each step of the plan, in the plan's order. It is a generator: when
      it is closed early (``break``, `close`, an error) it stops its work in ``finally`` and leaves nothing running that
      touches freed memory. Workers may stay alive for the next epoch.
    * It never raises for a single bad sample, but reports it in ``Delivery.failed``.
    * Memory of a delivered batch is never written again while a tensor refers to it.
    * `_release` frees everything (workers, buffers, handles) and may be called twice and after errors.
    * Order and windows come from the plan and from `fastdata.rng`, never from state of the backend's own.
    """

    name: ClassVar[str]
    """The backend's name, as in ``open_pipeline(backend=...)``."""
    options_type: ClassVar[type | None] = None
    """The dataclass that ``options=`` takes, or None where there are no options."""
    runs_callables: ClassVar[bool] = False
    """Whether user callables in ``transform`` are honoured."""
    source_kinds: ClassVar[tuple[str, ...]] = ("folder", "shards", "crop-ready shards")
    """Kinds of source that this backend reads: also "stream" where it takes `StepPlan.held` instead of positions."""

    def __init__(self, source: IndexedSource | ShardStream, spec: PipelineSpec, execution: Execution) -> None:
        """Check that this backend can honour what is asked.

        Args:
            source: Where samples come from. The pipeline closes it.
            spec: Which numbers come out.
            execution: How fast.

        Raises:
            UsageError: This backend cannot honour a part of it, or the samples cannot be dealt over the ranks.
        """
        self.stream = source if isinstance(source, ShardStream) else None
        self.source = cast("IndexedSource", source)  # a stream has its kind, root, fingerprint and close alone
        self.spec = spec
        self.execution = execution
        self._closed = True  # until it is known that there is something to close
        self._iteration: _Iteration | None = None
        self._next_epoch = 0
        self._resume_at = 0
        self._last_report = Report()
        self._refuse_what_cannot_be_honoured()
        self._plan(0, 0)
        self._closed = False

    @abstractmethod
    def _batches(self, plan: EpochPlan) -> Generator[Delivery, None, None]:
        """Yield one delivery for each step of the plan, in order."""

    @abstractmethod
    def _release(self) -> None:
        """Free workers, buffers and handles. Idempotent."""

    @classmethod
    def availability(cls) -> Availability:
        """Say whether this backend works on this machine. Overridden where importing its module does not prove it."""
        return Availability(cls.name, works=True)

    @classmethod
    def open_source(
        cls,
        data: Any,
        labels: Labels,
        options: Any,  # noqa: ARG003 - for those that override it
        *,
        skip_damaged: bool,
    ) -> IndexedSource | ShardStream:
        """Open what this backend reads. Overridden where `options` decide how.

        Args:
            data: As in ``open_pipeline``.
            labels: As in ``open_pipeline``.
            options: As in ``open_pipeline``; not checked yet.
            skip_damaged: Whether what is damaged in shards without an index may be left out, and reported.
        """
        from fastdata.sources.open import open_source

        return open_source(data, labels=labels, skip_damaged=skip_damaged)

    def _details(self) -> dict[str, Any]:
        """Return what the backend counts besides, for `Report.details`."""
        return {}

    @final
    def __iter__(self) -> Iterator[Batch]:
        """Start the next epoch, or continue the one that `load_state_dict` set. Closes a running iteration."""
        if self._closed:
            raise UsageError(f"{self.name} pipeline", "iterated after close()", "an open pipeline", "Open a new one.")
        self._end_iteration()
        epoch, done = self._next_epoch, self._resume_at
        plan = self._plan(epoch, done)
        self._next_epoch, self._resume_at = epoch + 1, 0
        self._iteration = _Iteration(self, plan)
        return self._iteration

    @final
    def __len__(self) -> int:
        """Return how many steps the current or, between epochs, the next iteration has: its exact number of batches.

        Steps of which nothing is left after skips count. After `load_state_dict` in mid-epoch it is what remains.
        """
        if self._iteration is not None and not self._iteration.finished and self._resume_at == 0:
            return len(self._iteration.plan.steps)
        return len(self._plan(self._next_epoch, self._resume_at).steps)

    @final
    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration runs. Without it epochs count up by themselves.

        Called with the epoch that `load_state_dict` resumed, it keeps the place inside that epoch.

        Args:
            epoch: Number >= 0; order and draws depend on it.
        """
        if epoch < 0:
            raise UsageError("epoch", f"{epoch}", "a number >= 0")
        if epoch != self._next_epoch:
            self._resume_at = 0
        self._next_epoch = epoch

    @final
    def state_dict(self) -> dict[str, Any]:
        """Return where this pipeline stands: small, JSON-able, counted in samples handed out over all ranks.

        It is the same on every rank, and fits any backend, worker count, batch size and number of ranks.
        """
        epoch, samples = self._next_epoch, self._resume_at
        running = self._iteration
        if running is not None and samples == 0 and epoch == running.plan.epoch + 1:
            done, steps = running.steps_done, running.plan.steps
            if not steps.all_done(done):
                epoch, samples = running.plan.epoch, steps.end(done - 1) if done else steps.done
        return {
            "version": _STATE_VERSION,
            "epoch": epoch,
            "samples": samples,
            "seed": self.spec.seed,
            "shuffle": repr(self.spec.shuffle),
            "size": len(self.source) if self.stream is None else None,
            "fingerprint": self.source.fingerprint,
        }

    @final
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`: the next iteration yields what was not handed out yet.

        Args:
            state: What `state_dict` returned, here or on any other backend, worker count, batch size or world size.

        Raises:
            StateError: The state belongs to other samples, another seed or another order.
        """
        here = self.state_dict()
        if not isinstance(state, dict):
            raise StateError("state", f"{state!r}", "what state_dict() returned")
        if state.keys() != here.keys() or state["version"] != _STATE_VERSION:
            found = f"version {state.get('version')!r}, keys {sorted(state)}"
            raise StateError("state", found, f"a version {_STATE_VERSION} state of fastdata")
        for key in ("size", "fingerprint", "seed", "shuffle"):
            if state[key] != here[key]:
                raise StateError(
                    f"state[{key!r}]",
                    f"{state[key]!r}",
                    f"{here[key]!r}",
                    "Resume with the same samples, seed and order.",
                )
        epoch, samples = int(state["epoch"]), int(state["samples"])
        size = 1 if self.stream is not None else here["size"]
        if not 0 <= samples < size or epoch < 0:
            raise StateError("state", f"epoch {epoch}, samples {samples}", f"epoch >= 0, 0 <= samples < {size}")
        self._plan(epoch, samples)
        self._end_iteration()
        self._iteration = None
        self._next_epoch, self._resume_at = epoch, samples

    @final
    def report(self) -> Report:
        """Return what the running or last epoch delivered, skipped and waited for, on this rank."""
        if self._iteration is not None:
            self._last_report = self._iteration.snapshot()
        return copy.deepcopy(self._last_report)

    @final
    def close(self) -> None:
        """Stop workers and free memory and handles. Idempotent; delivered batches stay valid."""
        if self._closed:
            return
        self._closed = True
        try:
            self._end_iteration()
        finally:
            self._release()
            self.source.close()

    @final
    def __enter__(self) -> Pipeline:
        """Return the pipeline itself."""
        return self

    @final
    def __exit__(self, *_: object) -> None:
        """Close the pipeline."""
        self.close()

    def __del__(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """Close a pipeline that the user forgot; at interpreter exit modules may be gone, and the system cleans up.

        The garbage collector calls this in any thread. Closing waits for work, so work keeps its pipeline alive: see
        `fastdata.threads.WorkerThreads`.
        """
        if hasattr(self, "_iteration") and not _is_finalizing():
            self.close()

    def _end_iteration(self) -> None:
        if self._iteration is not None:
            self._last_report = self._iteration.snapshot()
            self._iteration.stop()

    def _plan(self, epoch: int, done: int) -> EpochPlan:
        if self.stream is not None:
            return StreamPlan(self.stream, self.spec, epoch)
        spec, size = self.spec, len(self.source)
        steps = Steps(size, done, spec.batch_size, spec.rank, spec.world_size, spec.drop_last)
        if len(steps) == 0 and not done:  # after a resume, larger steps may find nothing left: an epoch of no batches
            raise UsageError(
                "drop_last",
                f"no full step: {counted(size, 'sample')}, batch_size={spec.batch_size}, world_size={spec.world_size}",
                "at least one full step in an epoch",
                "Use a smaller batch size or drop_last=False.",
            )
        order = make_order(_indexed_shuffle(spec), size, self.source.layout, spec.seed, epoch)
        return IndexedPlan(epoch, steps, order, self.source)

    def _refuse_what_cannot_be_honoured(self) -> None:
        if self.source.kind not in self.source_kinds:
            raise UsageError(
                f'backend="{self.name}"',
                f"a source of kind {self.source.kind} ({self.source.root})",
                " or ".join(self.source_kinds),
                "Convert a folder with `fastdata shard`, or choose another backend.",
            )
        if self.spec.recipe.callables and not self.runs_callables:
            raise UsageError(
                f'backend="{self.name}"',
                "a Python callable in transform",
                "fastdata's own transforms",
                'Use a host backend ("pil", "torchvision", "webdataset"), or batch_transform=.',
            )
        wanted = self.options_type
        if self.execution.options is not None and (wanted is None or not isinstance(self.execution.options, wanted)):
            expected = f"fastdata.{wanted.__name__}" if wanted else "no options"
            raise UsageError("options", f"{self.execution.options!r}", f'{expected} for backend="{self.name}"')


class _Iteration(Iterator[Batch]):
    """One running epoch: applies the skip policy and the batch transform, counts, and knows how far it came."""

    def __init__(self, pipeline: Pipeline, plan: EpochPlan) -> None:
        self.plan = plan
        self.steps_done = 0
        self.finished = False
        self._pipeline = pipeline
        self._spec = pipeline.spec
        self._report = Report(epoch=plan.epoch, skipped=_lost_at_opening(pipeline))
        self._started = time.perf_counter()
        self._deliveries = pipeline._batches(plan)

    def __iter__(self) -> _Iteration:
        return self

    def __next__(self) -> Batch:
        if self.finished:
            raise StopIteration
        asked = time.perf_counter()
        try:
            batch = self._next_batch()
        except BaseException:
            self.stop()
            raise
        finally:
            now = time.perf_counter()
            self._report.waited_s += now - asked
            self._report.total_s = now - self._started
        return batch

    def stop(self) -> None:
        """End the epoch early; idempotent."""
        if not self.finished:
            self.finished = True
            self._report.details = self._pipeline._details()
        self._deliveries.close()

    def snapshot(self) -> Report:
        if not self.finished:
            self._report.total_s = time.perf_counter() - self._started
            self._report.details = self._pipeline._details()
        return copy.deepcopy(self._report)

    def _next_batch(self) -> Batch:
        for delivery in self._deliveries:
            step = self.steps_done
            self._count(delivery)
            self.steps_done += 1
            if delivery.batch is None:
                self._note_empty(step, delivery)
                continue
            batch = self._transformed(delivery.batch, step)
            self._report.batches += 1
            self._report.delivered += len(batch)
            return batch
        if not self.plan.steps.all_done(self.steps_done):
            raise FastDataError(
                f"{self._pipeline.name} backend",
                f"{self.steps_done} steps, more or fewer than planned",
                "one delivery for each step",
                "This is a defect of the backend.",
            )
        raise StopIteration

    def _note_empty(self, step: int, delivery: Delivery) -> None:
        self._report.empty_batches += 1
        if self._spec.world_size == 1:
            return
        where = "; ".join(f"{skipped.where}: {skipped.reason}" for skipped in delivery.failed[:3])
        warnings.warn(
            f"rank {self._spec.rank} makes one batch fewer than the others: nothing of step {step} in epoch "
            f"{self.plan.epoch} could be read ({where}). Ranks that train together wait for it forever; check the data "
            'with `fastdata check` and train with on_error="raise".',
            RuntimeWarning,
            stacklevel=4,
        )

    def _count(self, delivery: Delivery) -> None:
        if delivery.failed and self._spec.skip is None:
            first = delivery.failed[0]
            raise SampleError(
                first.where,
                first.reason,
                "a picture that the reference decoder reads",
                'Repair or remove it (`fastdata check` lists all such files), or pass on_error="skip".',
                sample_id=first.sample_id,
            )
        self._report.fallbacks.update(delivery.fallbacks)
        self._report.skipped.extend(delivery.failed)
        if delivery.failed and self._spec.skip is not None:
            share = self._spec.skip.max_fraction
            # Of the whole epoch, after a resume too: what is left of it may hold all the bad samples.
            samples = self.plan.steps.total()
            budget = share * samples / self._spec.world_size
            if len(self._report.skipped) > budget:
                last = self._report.skipped[-1]
                raise SkipBudgetError(
                    last.where,
                    f"sample number {len(self._report.skipped)} of this epoch that cannot be read ({last.reason})",
                    f"at most {share:.2%} of about {samples // self._spec.world_size}",
                    "Look at loader.report().skipped, or allow more with fastdata.Skip(max_fraction=...).",
                )

    def _transformed(self, batch: Batch, step: int) -> Batch:
        transform = self._spec.batch_transform
        if transform is None:
            return batch
        from fastdata.seeding import seeded  # imports torch, which a clean `import fastdata` must not

        place = self.plan.steps.places(step)[0]
        key = int(scalar_key(self._spec.seed, self.plan.epoch, STREAM_BATCH, place, self._spec.rank))
        with seeded(key, self._spec.device):
            images, labels = transform(batch.images, batch.labels)
        return Batch(images, labels, batch.ids)


def _lost_at_opening(pipeline: Pipeline) -> list[Skipped]:
    """Return what making the index of damaged shards had to leave out; the first rank reports it."""
    if pipeline.stream is not None or pipeline.spec.rank != 0:
        return []
    return [Skipped(-1, pipeline.source.root, fault) for fault in pipeline.source.faults]


def _indexed_shuffle(spec: PipelineSpec) -> Any:
    if isinstance(spec.shuffle, BufferShuffle):
        raise UsageError(
            "shuffle",
            "BufferShuffle on a source with an index",
            "shuffle=True (a full permutation) or fastdata.BlockShuffle",
            "A buffer mixes worse and is only for streams.",
        )
    return spec.shuffle
