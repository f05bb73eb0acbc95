"""The order of an epoch and how it is dealt: pure functions of (seed, epoch, N, batch size, ranks), O(1) memory.

A full shuffle is a keyed permutation of positions (a Feistel network with cycle walking: Black and Rogaway, "Ciphers
with arbitrary finite domains", 2002), never a stored shuffle. Its constants are part of the contract: changing one
changes every run, so known answers are pinned in the tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fastdata.errors import StateError, UsageError
from fastdata.rng import STREAM_ORDER, mix64, scalar_key
from fastdata.spec import BlockShuffle
from fastdata.wording import counted


@dataclass(frozen=True)
class ShardLayout:
    """How the samples of an indexed source lie in its shards, for orders that read shards in sequence."""

    storage_order: NDArray[np.int64]
    """(n,) positions of all samples, sorted by (shard, offset). May be memory-mapped."""
    shard_starts: NDArray[np.int64]
    """(shards + 1,) shard s holds ``storage_order[shard_starts[s]:shard_starts[s + 1]]``."""


_ROUNDS = 6  # four give a pseudorandom permutation for random round functions (Luby, Rackoff 1988); two of margin


def permute(values: NDArray[np.int64], size: int, key: int) -> NDArray[np.int64]:
    """Apply the keyed permutation of 0..size-1 to some of its members.

    Args:
        values: (n,) int64, each in 0..size-1.
        size: Number of members, 1..2**62.
        key: Any int; selects the permutation.

    Returns:
        (n,) int64; over all of 0..size-1 each member comes exactly once.
    """
    if size == 1:
        return np.zeros_like(values)
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    round_keys = [scalar_key(key, number) for number in range(_ROUNDS)]
    out = _feistel(values.astype(np.uint64), half, round_keys)
    # Cycle walking: the network permutes 0..4**half-1, at most 4 * size members; walk on from those outside.
    outside = np.flatnonzero(out >= size)
    while outside.size:
        walked = _feistel(out[outside], half, round_keys)
        out[outside] = walked
        outside = outside[walked >= size]
    return out.astype(np.int64)


def _feistel(values: NDArray[np.uint64], half: int, round_keys: list[np.uint64]) -> NDArray[np.uint64]:
    bits, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> bits, values & mask
    with np.errstate(over="ignore"):
        for key in round_keys:
            left, right = right, left ^ (mix64(right + key) & mask)
    return (left << bits) | right


@dataclass(frozen=True)
class SequentialOrder:
    """Positions as they are: ascending ids."""

    size: int
    """Number of samples."""

    def positions(self, start: int, stop: int, step: int = 1) -> NDArray[np.int64]:
        """Return every `step`-th of the places start..stop-1 of the order: (n,) int64 positions."""
        return np.arange(start, stop, step, dtype=np.int64)


@dataclass(frozen=True)
class FullOrder:
    """A full permutation of all positions by (seed, epoch)."""

    size: int
    """Number of samples."""
    seed: int
    """The pipeline's seed."""
    epoch: int
    """The epoch's number."""

    def positions(self, start: int, stop: int, step: int = 1) -> NDArray[np.int64]:
        """Return every `step`-th of the places start..stop-1 of the order: (n,) int64 positions."""
        key = int(scalar_key(self.seed, self.epoch, STREAM_ORDER))
        return permute(np.arange(start, stop, step, dtype=np.int64), self.size, key)


class BlockOrder:
    """Shards in random order, taken some at a time, and the samples of these fully mixed: reads stay within a block."""

    def __init__(self, layout: ShardLayout, shuffle: BlockShuffle, seed: int, epoch: int) -> None:
        """Lay out the blocks of one epoch.

        Args:
            layout: How the samples lie in the shards.
            shuffle: How many shards a block holds.
            seed: The pipeline's seed.
            epoch: The epoch's number.
        """
        sizes = np.diff(layout.shard_starts)
        count = len(sizes)
        key = int(scalar_key(seed, epoch, STREAM_ORDER))
        self._layout = layout
        self._shards = permute(np.arange(count, dtype=np.int64), count, key)
        self._per_block = shuffle.shards
        self._key = key
        ends = np.cumsum(sizes[self._shards])
        last_of_block = np.minimum(np.arange(shuffle.shards, count + shuffle.shards, shuffle.shards), count) - 1
        self._block_starts = np.concatenate([[0], ends[last_of_block]]).astype(np.int64)
        self.size = int(self._block_starts[-1])

    def positions(self, start: int, stop: int, step: int = 1) -> NDArray[np.int64]:
        """Return every `step`-th of the places start..stop-1 of the order: (n,) int64 positions."""
        parts: list[NDArray[np.int64]] = []
        while start < stop:
            block = self.block_of(start)
            begin, end = self.places_of(block)
            inside = np.arange(start - begin, min(stop, end) - begin, step, dtype=np.int64)
            parts.append(self._storage_positions(block, permute(inside, end - begin, self._key + 1 + block)))
            start += len(inside) * step
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return len(self._block_starts) - 1

    def block_of(self, place: int) -> int:
        """Return the number of the block that holds a place of the order."""
        return int(np.searchsorted(self._block_starts, place, side="right")) - 1

    def places_of(self, block: int) -> tuple[int, int]:
        """Return the half-open range of places that a block takes in the order."""
        return int(self._block_starts[block]), int(self._block_starts[block + 1])

    def as_stored(self, block: int, start: int, stop: int) -> NDArray[np.int64]:
        """Return members start..stop-1 of a block in storage order: (stop - start,) int64 positions, for read-ahead."""
        return self._storage_positions(block, np.arange(start, stop, dtype=np.int64))

    def _storage_positions(self, block: int, inside: NDArray[np.int64]) -> NDArray[np.int64]:
        shards = self._shards[block * self._per_block : (block + 1) * self._per_block]
        starts = self._layout.shard_starts[shards]
        sizes = self._layout.shard_starts[shards + 1] - starts
        ends = np.cumsum(sizes)
        which = np.searchsorted(ends, inside, side="right")
        return np.asarray(
            self._layout.storage_order[starts[which] + inside - (ends[which] - sizes[which])], dtype=np.int64
        )


EpochOrder = SequentialOrder | FullOrder | BlockOrder


@dataclass(frozen=True)
class Steps:
    """The steps of one epoch, or of what is left of it, and this rank's batch in each.

    An epoch of N samples at batch size B on W ranks has S = ceil(N / (B * W)) steps. Step k takes the next B * W
    samples of the global order and deals them over the ranks one by one; where the last step has fewer than W samples
    left, it is topped up to W from the step before. So every rank has S batches of 1..B samples, and each sample comes
    once.
    """

    size: int
    """Number of samples N in the whole epoch."""
    done: int
    """Samples of the global order that were handed out before (a prefix; 0 at the epoch's start)."""
    batch_size: int
    """Samples a batch and rank, B >= 1."""
    rank: int
    """This rank, 0..world_size-1."""
    world_size: int
    """Number of ranks W >= 1."""
    drop_last: bool
    """Leave the last step out where it is not full on every rank."""

    def __post_init__(self) -> None:
        """Check that the samples can be dealt.

        Raises:
            UsageError: Fewer samples than ranks, or a last step that B = 1 cannot top up.
            StateError: What is left after a resume cannot be dealt over these ranks.
        """
        left, chunk = self.size - self.done, self.batch_size * self.world_size
        rest = left % chunk
        if self.drop_last or rest == 0 or rest >= self.world_size:
            return
        if left > chunk and self.batch_size > 1:
            return
        found = f"{counted(left, 'sample')}{' left in this epoch' if self.done else ''}, batch_size={self.batch_size}"
        wanted = f"at least one sample for each of the {self.world_size} ranks in every step"
        remedy = "Use fewer ranks, a larger batch size, or drop_last=True."
        if self.done:
            raise StateError("state", found, wanted, remedy)
        raise UsageError("world_size", found, wanted, remedy)

    def __len__(self) -> int:
        """Return the number of steps."""
        left, chunk = self.size - self.done, self.batch_size * self.world_size
        return left // chunk if self.drop_last else -(-left // chunk)

    def total(self) -> int:
        """Return how many samples the whole epoch hands out over all ranks, with what was handed out before."""
        return self.end(len(self) - 1)

    def all_done(self, steps: int) -> bool:
        """Tell whether nothing comes after this many steps."""
        return steps == len(self)

    def end(self, step: int) -> int:
        """Return how much of the global order is handed out after step `step`."""
        left, chunk = self.size - self.done, self.batch_size * self.world_size
        steps = len(self)
        rest = left - (steps - 1) * chunk
        end = min((step + 1) * chunk, left)
        if step == steps - 2 and rest < self.world_size:
            end -= self.world_size - rest
        return self.done + end

    def places(self, step: int) -> tuple[int, int]:
        """Return the half-open range of places in the global order that step `step` takes over all ranks."""
        return (self.done if step == 0 else self.end(step - 1)), self.end(step)

    def batches(self, order: EpochOrder) -> Iterator[NDArray[np.int64]]:
        """Yield this rank's positions of each step: (n,) int64, 1 <= n <= B."""
        for step in range(len(self)):
            start, stop = self.places(step)
            yield order.positions(start + self.rank, stop, self.world_size)


def make_order(
    shuffle: bool | BlockShuffle, size: int, layout: ShardLayout | None, seed: int, epoch: int
) -> EpochOrder:
    """Return the order of one epoch.

    Args:
        shuffle: False for ascending ids, True for a full permutation, or a `BlockShuffle`.
        size: Number of samples.
        layout: How samples lie in shards; needed by `BlockShuffle`.
        seed: The pipeline's seed.
        epoch: The epoch's number.

    Raises:
        UsageError: `BlockShuffle` on a source without shards.
    """
    if isinstance(shuffle, BlockShuffle):
        if layout is None:
            raise UsageError(
                "shuffle",
                "BlockShuffle on a folder, which has no shards",
                "shuffle=True",
                "Convert the folder with `fastdata shard` to read it in blocks.",
            )
        return BlockOrder(layout, shuffle, seed, epoch)
    return FullOrder(size, seed, epoch) if shuffle else SequentialOrder(size)
