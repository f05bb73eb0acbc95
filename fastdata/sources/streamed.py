"""Samples that came from a stream: in memory with their bytes, because nobody can read them a second time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fastdata.errors import ShardError, SourceError
from fastdata.sources import Encoded, read_one_by_one


@dataclass(frozen=True, slots=True)
class StreamedSample:
    """One sample with its bytes."""

    sample_id: int
    """The key, where it is nine digits as in shards of `fastdata shard`; else (shard + 1) * 2**40 + place in it."""
    label: int
    """Class index; 0 and of no meaning where no labels were asked for."""
    encoded: bytes
    """The picture as it lies in the shard."""
    shard: str
    """The shard's path or URL."""
    member: str
    """The picture's member name."""


@dataclass(frozen=True, slots=True)
class Lost:
    """A shard or sample that cannot be had."""

    error: ShardError
    """What is wrong with it."""
    shard: int
    """The shard's number."""
    sample_id: int = -1
    """The sample's id, -1 where it is a whole shard or the rest of one."""


@dataclass(frozen=True)
class HeldSamples:
    """Samples in memory, read by position like a source."""

    ids: NDArray[np.int64]
    """(n,) sample ids."""
    labels: NDArray[np.int64]
    """(n,) class indices."""
    encoded: tuple[bytes, ...]
    """The pictures."""
    places: tuple[tuple[str, str], ...]
    """Shard and member of each."""
    first: int = 0
    """Position of the first of them."""

    @classmethod
    def of(cls, samples: Sequence[StreamedSample]) -> HeldSamples:
        """Collect samples of a step."""
        return cls(
            np.fromiter((s.sample_id for s in samples), np.int64, len(samples)),
            np.fromiter((s.label for s in samples), np.int64, len(samples)),
            tuple(s.encoded for s in samples),
            tuple((s.shard, s.member) for s in samples),
        )

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.encoded)

    def part(self, start: int, stop: int) -> HeldSamples:
        """Return those at positions start..stop-1; they keep their positions."""
        return HeldSamples(
            self.ids[start:stop], self.labels[start:stop], self.encoded[start:stop], self.places[start:stop], start
        )

    def read(self, position: int) -> bytes:
        """Return the encoded bytes of one sample."""
        return self.encoded[position - self.first]

    def read_many(self, positions: NDArray[np.int64]) -> list[Encoded | SourceError]:
        """Return the encoded bytes of many samples."""
        return read_one_by_one(self, positions)

    def where(self, position: int) -> str:
        """Return the sample's place for messages."""
        shard, member = self.places[position - self.first]
        return f"{shard} member {member}"
