"""What one measurement is asked for, and what a loader has to offer to be measured."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from fastdata.errors import UsageError
from fastdata.pagecache import Cache

Mode = Literal["loader", "train", "synthetic"]


@dataclass(frozen=True)
class Task:
    """What one measuring process does. JSON-able."""

    data: str
    """What `fastdata.open_pipeline` opens."""
    backend: str
    """Its backend, or the name of the row where `loader` does not open a pipeline."""
    loader: str = "fastdata.measure:open_task_pipeline"
    """``module:factory``; called with this task, returns a `Loader`."""
    mode: Mode = "loader"
    """"loader": fetch only; "train": fetch and train; "synthetic": train on one batch that stays on the device."""
    batch_size: int = 256
    """Samples a batch and rank."""
    device: str = "cpu"
    """"cpu" or "cuda:N"."""
    dtype: str = "float32"
    """Of delivered images."""
    size: int = 224
    """Side of delivered images in pixels; the recipe is `fastdata.imagenet_train`."""
    workers: int | Literal["auto"] = "auto"
    """As in `fastdata.open_pipeline`."""
    prefetch: int = 2
    """As in `fastdata.open_pipeline`."""
    block_shards: int = 0
    """Shards a block of `fastdata.BlockShuffle`; 0 is a full permutation."""
    on_error: Literal["raise", "skip"] = "skip"
    """As in `fastdata.open_pipeline`; the row counts what was skipped."""
    options: dict[str, Any] = field(default_factory=dict)
    """Fields of the backend's options, or a baseline's own settings."""
    model: str = ""
    """Model of the training step."""
    compiled: bool = False
    """Whether ``torch.compile`` is applied to it."""
    cache: Cache = "warm"
    """"cold": the window ends with the first epoch, because a second one reads from the page cache."""
    seconds: float = 10.0
    """The window lasts at least this long ..."""
    min_batches: int = 10
    """... and holds at least this many batches."""
    warmup_s: float = 2.0
    """The warm-up lasts at least this long, besides dropping all that was made ahead. Cold runs only do the latter."""
    rendezvous: tuple[str, int, str] | None = None
    """(host, port, key prefix) of the store through which the ranks of a job meet; None for a single process."""
    rank: int = 0
    """This rank of the job."""
    world_size: int = 1
    """Ranks of the job."""

    @property
    def drops_last(self) -> bool:
        """Whether partial batches are dropped: in training each new shape would start compilers and autotuners."""
        return self.mode == "train"


@dataclass
class Loader:
    """What a loader factory returns: anything that can be iterated again and again, and how to look at it."""

    batches: Iterable[Any]
    """Yields batches that unpack as ``images, labels``, on the task's device."""
    ready_batches: int
    """Batches that may lie ready when the loader is not asked for any: what the warm-up drops at least."""
    report: Callable[[], Any] | None = None
    """Returns a `fastdata.batch.Report` of the running or last epoch, or None where the loader counts nothing."""
    close: Callable[[], None] = lambda: None
    """Frees the loader."""
    facts: dict[str, Any] = field(default_factory=dict)
    """For the row: source kind, order, samples, workers."""


def load_object(target: str) -> Any:
    """Return the object that ``package.module:name`` stands for.

    Raises:
        UsageError: The module does not import or has no such name.
    """
    module, _, name = target.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as exc:
        raise UsageError(f"{target!r}", str(exc), 'an importable "package.module:name"') from exc
