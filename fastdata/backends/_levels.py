"""Grey levels to delivered values on the CPU, by table: 256 levels of three channels have 768 results.

torch's own conversion, scaling and reordering of a batch pass over fresh memory several times and took 0.75 to 1.1 ms a
picture of 224 x 224, as long as its decode. One pass over reused memory takes 0.1 ms, and the table, which torch fills,
keeps the values to the last bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fastdata._native import compiled
from fastdata.backends._buffers import BufferPool, pinned_or_plain
from fastdata.spec import PipelineSpec

_KEPT_BATCHES = 4  # one with the caller, one being made, two that the caller may still hold


class LevelTable:
    """Turns uint8 pictures into the delivered dtype and memory format. Reuses memory that no tensor refers to."""

    def __init__(self, values: torch.Tensor, spec: PipelineSpec, pinned: bool) -> None:
        """Take the table.

        Args:
            values: (3, 256) of the delivered dtype, on the CPU: what each level of each channel becomes.
            spec: What is asked for: output size, batch size and memory format.
            pinned: Whether the results lie in page-locked memory.
        """
        self._dtype = values.dtype
        self._words = np.dtype(f"u{values.element_size()}")
        self._table = values.contiguous().view(torch.uint8).numpy().view(self._words)
        self._height, self._width = spec.recipe.output_size
        self._channels_last = spec.memory_format == "channels_last"
        row_bytes = 3 * self._height * self._width * values.element_size()
        self._buffers = BufferPool(pinned_or_plain((spec.batch_size, row_bytes), pinned=pinned), keep=_KEPT_BATCHES)

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """Return the delivered values.

        Args:
            images: (n, H, W, 3) uint8 on the CPU, n at most the batch size.

        Returns:
            (n, 3, H, W) of the table's dtype, contiguous in the asked memory format.
        """
        count, pixels = len(images), self._height * self._width
        out = self._buffers.take()[:count]
        pixel_step, channel_step = (3, 1) if self._channels_last else (1, pixels)
        levels = images.contiguous().view(count, pixels, 3).numpy()
        _look_up(levels, self._table, pixel_step, channel_step, out.view(self._words))
        values = torch.from_numpy(out).view(self._dtype)
        if self._channels_last:
            return values.view(count, self._height, self._width, 3).permute(0, 3, 1, 2)
        return values.view(count, 3, self._height, self._width)


@compiled
def _look_up(
    levels: NDArray[np.uint8], table: NDArray[Any], pixel_step: int, channel_step: int, out: NDArray[Any]
) -> None:
    """Write ``table[channel, level]`` for (n, pixels, 3) levels to (n, 3 * pixels) words, in either order."""
    red, green, blue = table[0], table[1], table[2]
    for picture in range(levels.shape[0]):
        at = 0
        for pixel in range(levels.shape[1]):
            out[picture, at] = red[levels[picture, pixel, 0]]
            out[picture, at + channel_step] = green[levels[picture, pixel, 1]]
            out[picture, at + 2 * channel_step] = blue[levels[picture, pixel, 2]]
            at += pixel_step
