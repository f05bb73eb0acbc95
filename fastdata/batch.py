"""What comes out: the batch, and the report of an epoch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Batch:
    """One batch; unpacks as ``images, labels``."""

    images: torch.Tensor
    """(n, 3, H, W) of the asked dtype and memory format, on the asked device; normalised unless uint8 (0..255)."""
    labels: torch.Tensor | None
    """(n,) int64 or (n, k) float32, same device; None where the source has no labels."""
    ids: torch.Tensor
    """(n,) int64 sample ids, on the host."""

    def __iter__(self) -> Iterator[Any]:
        """Yield images, then labels."""
        yield self.images
        yield self.labels

    def __len__(self) -> int:
        """Return the number of samples."""
        return int(self.ids.shape[0])


@dataclass(frozen=True)
class Skipped:
    """One sample that was left out."""

    sample_id: int
    """Its id."""
    where: str
    """Its path, or shard and member."""
    reason: str
    """What the reference decoder, or the read, said."""


@dataclass
class Report:
    """What an epoch delivered so far, and what it cost. `Pipeline.report` returns a copy."""

    epoch: int = 0
    """The epoch's number."""
    delivered: int = 0
    """Samples handed out on this rank."""
    batches: int = 0
    """Batches handed out on this rank."""
    empty_batches: int = 0
    """Steps of which nothing was left after skips, so that nothing was handed out."""
    skipped: list[Skipped] = field(default_factory=list)
    """Samples left out."""
    fallbacks: Counter[str] = field(default_factory=Counter)
    """Samples that the reference decoder took over, by reason."""
    waited_s: float = 0.0
    """Seconds the caller waited for batches."""
    total_s: float = 0.0
    """Seconds from the epoch's start to its end or to now."""
    details: dict[str, Any] = field(default_factory=dict)
    """What a backend counts besides. Host backends: ``pool``, ``workers``; summed over the workers, ``load_s`` seconds
    of loading, ``read_s`` of reads in it and ``python_s`` of Python code in it that kept every other thread of the
    process from running any; ``python_us_per_image``, the last for one image in microseconds: a million divided by it
    bounds the images/s that threads can reach."""
