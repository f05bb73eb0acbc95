"""Reused batch memory: a buffer is handed out again only when nothing refers to it any more."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fastdata.spec import MemoryFormat

_KEPT_BATCHES = 4  # one with the caller, one being made, two that the caller may still hold


def _references_when_free() -> int:
    """Return what `sys.getrefcount` says of an array that only a list refers to, on this interpreter."""
    holder = [np.empty(0, np.uint8)]
    return sys.getrefcount(holder[0])


class BufferPool:
    """Equal uint8 arrays, allocated when needed and reused when their last tensor, view or array is gone.

    ``torch.from_numpy`` keeps a reference to its array for as long as any tensor shares the storage, so the array's
    reference count says whether a delivered batch is still in use. Fresh memory for each batch would cost a page fault
    every 4 KiB: about 10 ms for a batch of 256 pictures at 224 x 224. Not thread-safe: one thread takes buffers.
    """

    def __init__(self, allocate: Callable[[], NDArray[np.uint8]], keep: int) -> None:
        """Start empty.

        Args:
            allocate: Makes one more buffer.
            keep: Buffers kept for reuse; more are made, and forgotten, while the user holds many batches.
        """
        self._allocate = allocate
        self._keep = keep
        self._buffers: list[NDArray[np.uint8]] = []
        self._free_count = _references_when_free()

    def take(self) -> NDArray[np.uint8]:
        """Return a buffer that nothing else refers to."""
        for number in range(len(self._buffers)):
            if sys.getrefcount(self._buffers[number]) == self._free_count:
                return self._buffers[number]
        fresh = self._allocate()
        if len(self._buffers) < self._keep:
            self._buffers.append(fresh)
        return fresh

    def clear(self) -> None:
        """Forget all buffers; those in use live on with their tensors."""
        self._buffers.clear()


def pinned_or_plain(shape: tuple[int, ...], *, pinned: bool) -> Callable[[], NDArray[np.uint8]]:
    """Return an allocator of uint8 arrays, page-locked where asked."""

    def allocate() -> NDArray[np.uint8]:
        if not pinned:
            return np.empty(shape, np.uint8)
        array: Any = torch.empty(shape, dtype=torch.uint8, pin_memory=True).numpy()
        return np.asarray(array)

    return allocate


@dataclass(frozen=True, slots=True)
class HeldBatch:
    """A batch on the host, as memory and as the tensor that is delivered."""

    memory: NDArray[np.uint8]
    """(n, bytes of a picture)."""
    images: torch.Tensor
    """(n, 3, H, W), of the asked dtype and memory format; the same memory."""
    channels_last: bool
    """Whether a pixel's channels lie side by side."""


class BatchMemory:
    """Memory of delivered batches on the host, reused when no tensor refers to it any more."""

    def __init__(
        self,
        batch_size: int,
        size: tuple[int, int],
        dtype: torch.dtype,
        memory_format: MemoryFormat,
        pinned: bool,
    ) -> None:
        """Allocate nothing yet.

        Args:
            batch_size: Pictures of a batch, at most.
            size: Height, width.
            dtype: Of the delivered tensors.
            memory_format: Of the delivered tensors.
            pinned: Whether they lie in page-locked memory.
        """
        self._size, self._dtype, self._channels_last = size, dtype, memory_format == "channels_last"
        row_bytes = 3 * size[0] * size[1] * dtype.itemsize
        self._buffers = BufferPool(pinned_or_plain((batch_size, row_bytes), pinned=pinned), keep=_KEPT_BATCHES)

    def take(self, count: int) -> HeldBatch:
        """Return memory for `count` pictures that nothing else refers to."""
        memory = self._buffers.take()[:count]
        values, (height, width) = torch.from_numpy(memory).view(self._dtype), self._size
        if self._channels_last:
            images = values.view(count, height, width, 3).permute(0, 3, 1, 2)
        else:
            images = values.view(count, 3, height, width)
        return HeldBatch(memory, images, self._channels_last)
