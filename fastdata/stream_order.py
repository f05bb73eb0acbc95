"""The order of samples that come from a stream, and how they are dealt: pure functions and generators, no I/O.

A stream has no index, so nobody knows how many samples it holds before its end. What can be fixed before reading is
fixed here from (seed, epoch) alone: the order of the shards, and which sample leaves the shuffle buffer when.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from itertools import islice
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from fastdata.errors import SourceError, StateError
from fastdata.order import Steps, permute
from fastdata.rng import STREAM_ORDER, keys, scalar_key
from fastdata.wording import counted

T = TypeVar("T")

_DRAWS_A_TIME = 4096


def shard_order(count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the shards of an epoch in shuffled order: (count,) int64, each of 0..count-1 once."""
    return permute(np.arange(count, dtype=np.int64), count, int(scalar_key(seed, epoch, STREAM_ORDER)))


def mix(samples: Iterator[T], buffer_samples: int, seed: int, epoch: int, rank: int) -> Generator[T, None, None]:
    """Mix a stream through a buffer: each new sample takes the place of one drawn at random, which leaves.

    Args:
        samples: The stream.
        buffer_samples: Samples held. Nothing leaves before as many have come, or the stream has ended.
        seed: The pipeline's seed.
        epoch: The epoch's number.
        rank: Whose stream it is; 0 where all ranks read the same.
    """
    held = list(islice(samples, buffer_samples))
    draws = _draws(seed, epoch, rank)
    for sample in samples:
        place = int(next(draws) * buffer_samples)
        leaving, held[place] = held[place], sample
        yield leaving
    while held:
        place = int(next(draws) * len(held))
        held[place], held[-1] = held[-1], held[place]
        yield held.pop()


def _draws(seed: int, epoch: int, rank: int) -> Iterator[float]:
    """Yield uniform numbers in [0, 1) without end, 53 random bits each."""
    start = 0
    base = int(scalar_key(seed, epoch, STREAM_ORDER, rank))
    while True:
        counters = np.arange(start, start + _DRAWS_A_TIME, dtype=np.int64)
        bits = keys(base, 0, counters, STREAM_ORDER)
        yield from ((bits >> np.uint64(11)).astype(np.float64) * 2.0**-53).tolist()
        start += _DRAWS_A_TIME


class Dealt(Generic[T]):
    """This rank's samples of one step."""

    def __init__(self, samples: list[T], *, last: bool) -> None:
        self.samples = samples
        self.last = last


def deal(samples: Iterator[T], batch_size: int, rank: int, world_size: int, *, drop_last: bool) -> Iterator[Dealt[T]]:
    """Deal a stream that every rank reads: the rule of `fastdata.order.Steps`, without knowing where it ends.

    One step is held back, because the last one may need samples from the one before.

    Args:
        samples: All samples, in the same order on every rank.
        batch_size: Samples a batch and rank.
        rank: This rank.
        world_size: Number of ranks.
        drop_last: Leave the last step out where it is not full on every rank.

    Raises:
        SourceError: The stream ends with fewer samples than every rank needs one of.
    """
    chunk = batch_size * world_size
    held = list(islice(samples, chunk))
    if drop_last and len(held) < chunk:
        held = []
    while held:
        following = list(islice(samples, chunk))
        if drop_last and len(following) < chunk:
            following = []
        short = world_size - len(following) if following else 0
        if short > 0:
            held, following = held[:-short], held[-short:] + following
        if len(held) < world_size:
            raise SourceError(
                "stream",
                f"{counted(len(held) + len(following), 'sample')} at its end, batch_size={batch_size}",
                f"at least one sample for each of the {world_size} ranks in every step",
                "Use fewer ranks, a larger batch size, or drop_last=True.",
            )
        yield Dealt(held[rank::world_size], last=not following)
        held = following


def deal_own(samples: Iterator[T], steps: Steps) -> Iterator[Dealt[T]]:
    """Deal an endless stream that only this rank reads: as many samples a step as `steps` gives this rank."""
    for number in range(len(steps)):
        start, stop = steps.places(number)
        count = len(range(start + steps.rank, stop, steps.world_size))
        yield Dealt(list(islice(samples, count)), last=number == len(steps) - 1)


class StreamSteps:
    """The steps of a stream's epoch: `fastdata.order.Steps` for who does not know where the epoch ends.

    `len` is a TypeError unless the user said how many samples there are; places inside the epoch cannot be resumed.
    """

    done = 0

    def __init__(self, batch_size: int, world_size: int, known: Steps | None) -> None:
        """Begin.

        Args:
            batch_size: Samples a batch and rank.
            world_size: Number of ranks.
            known: The steps that ``length=`` gives, or None.
        """
        self.known = known
        self.found: int | None = None
        self.samples_read = 0
        self._chunk = batch_size * world_size

    def __len__(self) -> int:
        """Return the number of steps.

        Raises:
            TypeError: Nobody said how many samples the stream holds.
        """
        if self.known is None:
            raise TypeError(
                "a stream without an index has no len(): pass options=fastdata.WebDatasetOptions(length=...) if you "
                "know how many samples it holds"
            )
        return len(self.known)

    def all_done(self, steps: int) -> bool:
        """Tell whether nothing comes after this many steps."""
        return steps == self.found

    def end(self, step: int) -> int:
        """Refuse: a place inside a stream cannot be found again without reading all that comes before.

        Raises:
            StateError: Always.
        """
        raise StateError(
            f"state_dict() after step {step}",
            "a place in the middle of a stream's epoch",
            "the start or the end of an epoch",
            "A stream without an index cannot continue in mid-epoch: save between epochs, or convert the data with "
            "`fastdata shard`, whose shards can.",
        )

    def places(self, step: int) -> tuple[int, int]:
        """Return the half-open range of places in the global order that a step takes, where all before were full."""
        return step * self._chunk, (step + 1) * self._chunk

    def total(self) -> int:
        """Return how many samples a skip budget refers to: as many as said, else as were read, but at least 1000."""
        if self.known is not None:
            return self.known.total()
        return max(self.samples_read, 1000)
