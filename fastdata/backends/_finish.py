"""From uint8 pictures to delivered values: colour, normalisation, erasing, dtype and layout, on the target device.

Shared by all backends, so that the numbers do not depend on who decoded. Random parts are drawn on the host from
(seed, epoch, id) and applied per sample.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray

from fastdata.backends._buffers import BatchMemory
from fastdata.backends._color import color_batch, plan_color
from fastdata.backends._color_kernel import color_picture
from fastdata.backends._levels import look_up
from fastdata.backends._transfer import to_device
from fastdata.rng import STREAM_ERASING, keys, uniforms
from fastdata.spec import PipelineSpec
from fastdata.transforms import RandomErasing

_ERASE_ATTEMPTS = 10


class BatchFinish:
    """Makes delivered batches of uint8 pictures. On the CPU it reuses memory that no tensor refers to."""

    def __init__(self, spec: PipelineSpec, *, pinned: bool = False) -> None:
        """Prepare constants.

        Args:
            spec: What is asked for.
            pinned: Whether host tensors made here lie in page-locked memory.
        """
        self._spec = spec
        self._pinned = pinned and spec.device == "cpu"
        self._dtype: torch.dtype = getattr(torch, spec.dtype)
        normalize = spec.recipe.normalize
        mean, std = (normalize.mean, normalize.std) if normalize else ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
        device = torch.device(spec.device)
        # (x / 255 - mean) / std as one multiply-add: x * scale + shift.
        self._scale = torch.tensor([1 / (255 * s) for s in std], device=device).view(1, 3, 1, 1)
        self._shift = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)], device=device).view(1, 3, 1, 1)
        self._memory = BatchMemory(
            spec.batch_size, spec.recipe.output_size, self._dtype, spec.memory_format, self._pinned
        )
        self._table = (
            self._delivered(torch.arange(256.0).repeat(3).view(1, 3, 1, 256)) if device.type == "cpu" else None
        )

    def __call__(self, images: torch.Tensor, ids: NDArray[np.int64], epoch: int) -> torch.Tensor:
        """Return the delivered images.

        Args:
            images: (n, H, W, 3) uint8 on the target device. May be delivered as it is (uint8, channels_last).
            ids: (n,) int64 sample ids.
            epoch: The epoch's number.

        Returns:
            (n, 3, H, W) of the asked dtype and memory format.
        """
        spec = self._spec
        out = self._on_host(images, ids, epoch) if images.is_cpu else self._on_gpu(images, ids, epoch)
        if spec.recipe.erasing is not None:
            out = _erased(out, spec.recipe.erasing, keys(spec.seed, epoch, ids, STREAM_ERASING))
        order = torch.channels_last if spec.memory_format == "channels_last" else torch.contiguous_format
        out = out.contiguous(memory_format=order)
        return out.pin_memory() if self._pinned and not out.is_pinned() else out

    def _on_gpu(self, images: torch.Tensor, ids: NDArray[np.int64], epoch: int) -> torch.Tensor:
        spec, color = self._spec, self._spec.recipe.color
        out = images.permute(0, 3, 1, 2)
        if color:
            out = color_batch(out.float().div_(255), plan_color(color, spec.seed, epoch, ids)).mul_(255)
        return self._delivered(out)

    def _on_host(self, images: torch.Tensor, ids: NDArray[np.int64], epoch: int) -> torch.Tensor:
        spec, color = self._spec, self._spec.recipe.color
        if not color and spec.dtype == "uint8" and spec.memory_format == "channels_last":
            return images.permute(0, 3, 1, 2)
        levels = images.contiguous().view(len(images), -1, 3).numpy()
        batch = self._memory.take(len(images))
        if not color:
            assert self._table is not None
            look_up(levels, self._table, batch)
            return batch.images
        plan = plan_color(color, spec.seed, epoch, ids)
        planes = torch.empty((1, 3, *spec.recipe.output_size))
        by_pixel = planes.view(3, -1).numpy()
        for index in range(len(images)):
            color_picture(levels[index], plan.changes[index], plan.factors[index], by_pixel)
            batch.images[index : index + 1] = self._delivered(planes)
        return batch.images

    def _delivered(self, values: torch.Tensor) -> torch.Tensor:
        """Return (n, 3, H, W) values, 0..255, uint8 or float32, as the asked dtype."""
        if self._dtype == torch.uint8:
            return values if values.dtype == torch.uint8 else values.round().clamp_(0, 255).to(torch.uint8)
        # float32 first: in half precision 255 grey levels times the scale would round twice.
        return torch.addcmul(self._shift, values.float(), self._scale).to(self._dtype)


def _erased(images: torch.Tensor, erasing: RandomErasing, sample_keys: NDArray[np.uint64]) -> torch.Tensor:
    """Overwrite one rectangle of some samples, drawn by torchvision's rule (``RandomErasing.get_params``).

    On the CPU in place; on a GPU in a copy, without a launch for each.
    """
    height, width = images.shape[2], images.shape[3]
    draws = uniforms(sample_keys, 1 + 4 * _ERASE_ATTEMPTS)
    boxes = np.zeros((len(draws), 4), np.int64)  # top, bottom, left, right; empty where nothing is erased
    for row in np.flatnonzero(draws[:, 0] < erasing.p):
        boxes[row] = _erase_box(draws[row, 1:].reshape(_ERASE_ATTEMPTS, 4), height, width, erasing)
    if images.is_cpu:
        for picture, (first, end, start, stop) in zip(images, boxes.tolist(), strict=True):
            picture[:, first:end, start:stop] = erasing.value
        return images
    top, bottom, left, right = to_device(torch.from_numpy(boxes), images.device).view(-1, 4, 1, 1, 1).unbind(1)
    rows = torch.arange(height, device=images.device).view(1, 1, -1, 1)
    columns = torch.arange(width, device=images.device).view(1, 1, 1, -1)
    inside = (rows >= top) & (rows < bottom) & (columns >= left) & (columns < right)
    return images.masked_fill(inside, erasing.value)


def _erase_box(
    attempts: NDArray[np.float64], height: int, width: int, erasing: RandomErasing
) -> tuple[int, int, int, int]:
    """Return (top, bottom, left, right); empty where no attempt fits, as in torchvision."""
    log_low, log_high = math.log(erasing.ratio[0]), math.log(erasing.ratio[1])
    for area_draw, ratio_draw, top_draw, left_draw in attempts:
        area = height * width * (erasing.scale[0] + (erasing.scale[1] - erasing.scale[0]) * area_draw)
        aspect = math.exp(log_low + (log_high - log_low) * ratio_draw)
        h, w = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < h < height and 0 < w < width:
            top, left = int(top_draw * (height - h + 1)), int(left_draw * (width - w + 1))
            return top, top + h, left, left + w
    return 0, 0, 0, 0
