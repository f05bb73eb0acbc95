"""Reused batch memory: a buffer is handed out again only when nothing refers to it any more."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray


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
        import torch

        array: Any = torch.empty(shape, dtype=torch.uint8, pin_memory=True).numpy()
        return np.asarray(array)

    return allocate
