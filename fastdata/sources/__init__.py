"""Where samples come from: the protocol that a folder, indexed shards and any other indexed source share."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fastdata.errors import SourceError
from fastdata.order import ShardLayout

Encoded = bytes | memoryview
"""One encoded picture as it lies in the source; a memoryview points into a mapped shard and costs no copy."""


class SampleReader(Protocol):
    """What is needed to load samples: their bytes, and where they lie."""

    def read(self, position: int) -> Encoded:
        """Return the encoded bytes of one sample.

        Raises:
            SourceError: The file or member is gone or unreadable; the message names it.
        """
        ...

    def read_many(self, positions: NDArray[np.int64]) -> list[Encoded | SourceError]:
        """Return the encoded bytes of many samples, or why one cannot be read, in one call.

        The views are valid until the same thread calls this again. `read_one_by_one` serves where one call gains
        nothing.

        Args:
            positions: (n,) int64.
        """
        ...

    def where(self, position: int) -> str:
        """Return the sample's place for messages: a path, or ``shard-000001.tar member 000000017.jpg``."""
        ...


class IndexedSource(SampleReader, Protocol):
    """N samples, addressed by *position* 0..N-1 in ascending order of their ids.

    Implementations are immutable, picklable (they reopen files after unpickling), safe to read from many threads, and
    hold arrays, never a Python object per sample: worker processes share the pages of an array, but copy those of a
    list when reference counts change (pytorch/pytorch#13246).
    """

    kind: str
    """What the source is, for reports: "folder", "shards" or "crop-ready shards"."""
    root: str
    """The path or pattern it was opened from, for messages."""
    ids: NDArray[np.int64]
    """(n,) ascending. An id is the sample's position in the sorted index of the original folder; gaps are possible."""
    labels: NDArray[np.int64] | NDArray[np.float32] | None
    """(n,) int64 class indices, (n,) int64 or (n, k) float32 from a label file or callable, or None without labels."""
    classes: tuple[str, ...]
    """Class names, sorted as text; the index of a name is its label. Empty where there are none."""
    fingerprint: str
    """Hex digest over what makes two sources the same set of samples: their ids and names. Guards ``load_state_dict``
    and comparisons of benchmarks."""
    faults: tuple[str, ...]
    """What is damaged and left out, as messages; only where it may be."""
    layout: ShardLayout | None
    """How the samples lie in shards; None for a folder."""

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def will_need(self, positions: NDArray[np.int64]) -> None:
        """Advise the system that these samples are read soon (read-ahead). May do nothing."""
        ...

    def close(self) -> None:
        """Release file handles and maps. Idempotent."""
        ...


def read_one_by_one(source: SampleReader, positions: NDArray[np.int64]) -> list[Encoded | SourceError]:
    """Return what `SampleReader.read_many` does, by `SampleReader.read`."""
    found: list[Encoded | SourceError] = []
    for position in positions.tolist():
        try:
            found.append(source.read(position))
        except SourceError as error:
            found.append(error)
    return found


class OneByOne:
    """A reader of the same samples whose bytes stay valid: for a second look while views of `read_many` are in use."""

    def __init__(self, source: SampleReader) -> None:
        """Wrap a reader."""
        self._source = source

    def read(self, position: int) -> Encoded:
        """Return the encoded bytes of one sample; see `SampleReader.read`."""
        return self._source.read(position)

    def read_many(self, positions: NDArray[np.int64]) -> list[Encoded | SourceError]:
        """Return the encoded bytes of many samples."""
        return read_one_by_one(self._source, positions)

    def where(self, position: int) -> str:
        """Return the sample's place for messages."""
        return self._source.where(position)
