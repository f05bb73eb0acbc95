"""What an epoch has to do: its steps, each with the samples that this rank loads in it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fastdata.batch import Skipped
from fastdata.errors import SourceError, UsageError
from fastdata.order import BlockOrder, EpochOrder, Steps
from fastdata.sources import IndexedSource
from fastdata.sources.stream import ShardStream
from fastdata.sources.streamed import HeldSamples, Lost, StreamedSample
from fastdata.spec import BufferShuffle, PipelineSpec
from fastdata.stream_order import Dealt, StreamSteps, deal, deal_own, mix, shard_order
from fastdata.wording import counted

SHARDS_SIDE_BY_SIDE = 4  # part of the order of a shuffled stream: changing it changes every such run
SHARDS_AHEAD = 1


@dataclass(frozen=True)
class StepPlan:
    """One rank's part of one step."""

    epoch: int
    """The epoch's number; draws are made from (seed, epoch, id)."""
    number: int
    """The step's number within this iteration, from 0."""
    positions: NDArray[np.int64]
    """(n,) positions in the source, or in `held`, in delivery order."""
    ids: NDArray[np.int64]
    """(n,) their sample ids."""
    held: HeldSamples | None = None
    """The samples themselves where they come from a stream, which nobody can read by position."""
    lost: tuple[Skipped, ...] = ()
    """What the stream could not give before this step's end. The delivery reports it."""


class EpochPlan(ABC):
    """One epoch, or what is left of it after a resume, as one rank sees it."""

    epoch: int
    """The epoch's number."""

    @property
    @abstractmethod
    def steps(self) -> Steps | StreamSteps:
        """How many steps there are and what they take."""

    @abstractmethod
    def __iter__(self) -> Generator[StepPlan, None, None]:
        """Yield the plan of each step. Close it to stop early."""


class IndexedPlan(EpochPlan):
    """The epoch of a source with an index."""

    def __init__(self, epoch: int, steps: Steps, order: EpochOrder, source: IndexedSource) -> None:
        """Join what is known of the epoch.

        Args:
            epoch: The epoch's number.
            steps: How many steps there are and what they take.
            order: The global order.
            source: Gives the ids, and is told what is read soon.
        """
        self.epoch = epoch
        self.order = order
        self._source = source
        self._steps = steps

    @property
    def steps(self) -> Steps:
        """How many steps there are and what they take."""
        return self._steps

    def __iter__(self) -> Generator[StepPlan, None, None]:
        """Yield the plan of each step; with blocks, have the next one read ahead meanwhile."""
        for number, positions in enumerate(self.steps.batches(self.order)):
            if isinstance(self.order, BlockOrder):
                self._read_ahead(self.order, *self.steps.places(number))
            yield StepPlan(self.epoch, number, positions, np.asarray(self._source.ids[positions]))

    def _read_ahead(self, order: BlockOrder, first: int, stop: int) -> None:
        """Have the same share of the next block read, in storage order, that this step takes of its own block.

        Any sample of a block may come first, so the whole block has to be there when it begins. Read in proportion, it
        comes in one sequential pass, and no request holds up a step.
        """
        while first < stop:
            block = order.block_of(first)
            begin, end = order.places_of(block)
            upto = min(stop, end)
            if block + 1 < order.blocks:
                size = order.places_of(block + 1)[1] - end
                shares = ((place - begin) * size // (end - begin) for place in (first, upto))
                self._source.will_need(order.as_stored(block + 1, *shares))
            first = upto


class StreamPlan(EpochPlan):
    """The epoch of a stream: shards in order, samples through the buffer, dealt over the ranks, as they are read.

    With ``split="samples"`` (and on one rank) every rank reads everything, and steps follow the rule of indexed sources
    exactly. With ``split="shards"`` a rank reads only its own shards and makes as many steps as `length` gives: what
    its shards hold more is left out, where they hold less they are read again.
    """

    def __init__(self, stream: ShardStream, spec: PipelineSpec, epoch: int) -> None:
        """Check that the stream can be dealt.

        Args:
            stream: The shards.
            spec: What is asked for.
            epoch: The epoch's number.

        Raises:
            UsageError: A shuffle that needs an index, fewer shards than ranks, or no `length` where it is needed.
        """
        if isinstance(spec.shuffle, BufferShuffle):
            self._buffer_samples = spec.shuffle.samples
        elif spec.shuffle is False:
            self._buffer_samples = 0
        else:
            raise UsageError(
                "shuffle",
                f"{spec.shuffle!r} on a stream, which has no index",
                "fastdata.BufferShuffle(samples=10_000) or False",
                "A full permutation needs local shards, read without stream=True.",
            )
        self.epoch = epoch
        self.repeated = 0
        self._first_pass: int | None = None
        self._stream = stream
        self._spec = spec
        self._own_shards = spec.world_size > 1 and stream.split == "shards"
        if self._own_shards:
            self._check_shards_reach()
        known = None
        if stream.length is not None:
            known = Steps(stream.length, 0, spec.batch_size, spec.rank, spec.world_size, spec.drop_last)
            if len(known) == 0:
                raise UsageError(
                    "drop_last",
                    f"no full step: length={stream.length}, batch_size={spec.batch_size}, {spec.world_size} ranks",
                    "at least one full step in an epoch",
                )
        self._steps = StreamSteps(spec.batch_size, spec.world_size, known)

    @property
    def steps(self) -> StreamSteps:
        """How many steps there are, as far as anybody knows."""
        return self._steps

    def __iter__(self) -> Generator[StepPlan, None, None]:
        """Read, and yield the plan of each step.

        Raises:
            ShardError: A shard or sample cannot be read, and nothing may be skipped.
            SourceError: The stream has no full step, or another number of samples than `length` said.
        """
        lost: list[Skipped] = []
        number, delivered = 0, 0
        with closing(self._samples(lost)) as samples:
            for number, dealt in enumerate(self._deal(samples), 1):
                if dealt.last:
                    self.steps.found = number
                held = HeldSamples.of(dealt.samples)
                delivered += len(held)
                self.repeated = max(0, delivered - self._first_pass) if self._first_pass is not None else 0
                taken, lost[:] = tuple(lost), ()
                yield StepPlan(self.epoch, number - 1, np.arange(len(held)), held.ids, held, taken)
        if number == 0:
            first = f"; {lost[0].where}: {lost[0].reason}" if lost else ""
            raise SourceError(
                self._stream.root,
                f"no full step in this epoch: {counted(self.steps.samples_read, 'sample')}{first}",
                f"at least {self._spec.batch_size * self._spec.world_size if self._spec.drop_last else 1}",
            )

    def _deal(self, samples: Generator[StreamedSample, None, None]) -> Iterator[Dealt[StreamedSample]]:
        spec, known = self._spec, self.steps.known
        if self._own_shards and known is not None:
            yield from deal_own(samples, known)
            return
        number = 0
        for number, dealt in enumerate(
            deal(samples, spec.batch_size, spec.rank, spec.world_size, drop_last=spec.drop_last), 1
        ):
            yield Dealt(dealt.samples, last=dealt.last and (known is None or number >= len(known)))
        # Samples that were lost leave steps without any; the epoch keeps its length.
        promised = len(known) if known is not None and number else 0
        for step in range(number + 1, promised + 1):
            yield Dealt([], last=step == promised)

    def _samples(self, lost: list[Skipped]) -> Generator[StreamedSample, None, None]:
        """Yield samples in the order of the epoch; without end where this rank has shards of its own."""
        spec, stream = self._spec, self._stream
        shards = np.arange(len(stream.shards))
        side_by_side = 1
        if self._buffer_samples:
            shards = shard_order(len(shards), spec.seed, self.epoch)
            side_by_side = SHARDS_SIDE_BY_SIDE
        if self._own_shards:
            shards = shards[spec.rank :: spec.world_size]
        rank = spec.rank if self._own_shards else 0
        while True:
            before = self.steps.samples_read
            with closing(stream.read(shards.tolist(), side_by_side, SHARDS_AHEAD)) as found:
                sound = self._sound(found, lost)
                # Each pass leaves the buffer before the next begins, so that no sample repeats before all have come.
                if self._buffer_samples:
                    sound = mix(sound, self._buffer_samples, spec.seed, self.epoch, rank)
                yield from sound
            if not self._own_shards:
                return
            if self._first_pass is None:
                self._first_pass = self.steps.samples_read
            if self.steps.samples_read == before:
                raise SourceError(stream.root, f"no sample in the shards of rank {spec.rank}", "at least one")

    def _sound(self, found: Iterator[StreamedSample | Lost], lost: list[Skipped]) -> Iterator[StreamedSample]:
        """Sort out what was lost, and hold the number of samples against what the user said."""
        spec, expected = self._spec, None if self._own_shards else self._stream.length
        lost_any = False
        for item in found:
            if isinstance(item, StreamedSample):
                self.steps.samples_read += 1
                if expected is not None and self.steps.samples_read > expected:
                    raise self._wrong_length(f"more than {expected} samples")
                yield item
                continue
            if spec.skip is None:
                raise item.error
            lost_any = True
            if self._own_shards or item.shard % spec.world_size == spec.rank:  # one rank reports it
                lost.append(Skipped(item.sample_id, item.error.subject, item.error.found))
        if expected is not None and not lost_any and self.steps.samples_read < expected:
            raise self._wrong_length(counted(self.steps.samples_read, "sample"))

    def _wrong_length(self, found: str) -> SourceError:
        return SourceError(
            self._stream.root,
            found,
            f"{self._stream.length}, as WebDatasetOptions(length=...) says",
            "Correct length, or leave it out.",
        )

    def _check_shards_reach(self) -> None:
        spec, stream = self._spec, self._stream
        if stream.length is None:
            raise UsageError(
                "options",
                f"a stream on {spec.world_size} ranks without a length",
                "WebDatasetOptions(length=...), the samples in all shards, so that all ranks make equal steps",
                'Or split="samples": every rank reads all shards and takes its part, exact without a length.',
            )
        if len(stream.shards) < spec.world_size:
            raise UsageError(
                "world_size",
                f"{counted(len(stream.shards), 'shard')} for {counted(spec.world_size, 'rank')}",
                f"at least one shard for each rank; {SHARDS_SIDE_BY_SIDE} a rank, read side by side, mix better",
                'Make more shards, or pass WebDatasetOptions(split="samples").',
            )
