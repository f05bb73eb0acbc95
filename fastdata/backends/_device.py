"""From uint8 pictures to the delivered batch: transfer, colour, normalisation, erasing, layout, on the target device.

Shared by all backends, so that the numbers do not depend on who decoded. Random parts are drawn on the host from
(seed, epoch, id) and applied per sample.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fastdata.backends._levels import LevelTable
from fastdata.batch import Batch
from fastdata.errors import BackendUnavailableError
from fastdata.rng import STREAM_COLOR, STREAM_ERASING, keys, uniforms
from fastdata.spec import PipelineSpec
from fastdata.transforms import ColorJitter, RandomErasing, RandomGrayscale, jitter_range

_LUMA = (0.2989, 0.587, 0.114)  # ITU-R BT.601, as torchvision's rgb_to_grayscale
_ERASE_ATTEMPTS = 10


@dataclass(frozen=True)
class HostBatch:
    """Loaded pictures on the host, before the device stage."""

    images: NDArray[np.uint8]
    """(n, H, W, 3) uint8."""
    labels: NDArray[Any] | None
    """(n,) int64 or (n, k) float32."""
    ids: NDArray[np.int64]
    """(n,) int64."""
    epoch: int
    """The epoch's number, for draws."""


def check_device(backend: str, device: str) -> None:
    """Refuse a GPU that torch cannot use, before anything is read.

    Args:
        backend: The backend's name, for the message.
        device: "cpu" or "cuda:N".

    Raises:
        BackendUnavailableError: torch finds no such GPU; the message has torch's reason.
    """
    if device == "cpu":
        return
    subject, expected = f'{backend} on device="{device}"', "a GPU that torch can use"
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        if int(device.removeprefix("cuda:")) >= count:
            raise BackendUnavailableError(
                subject, f"torch sees {count} GPUs, cuda:0 to cuda:{count - 1}", expected, "Choose one of them."
            )
        return
    try:
        torch.cuda.init()
        found = "torch finds no GPU"
    except (RuntimeError, AssertionError) as exc:  # AssertionError: a torch that was built without CUDA
        found = str(exc).splitlines()[0].rstrip(".")
    remedy = 'Use device="cpu", or a machine with an NVIDIA GPU, its driver and a torch built for CUDA.'
    raise BackendUnavailableError(subject, found, expected, remedy)


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a small host tensor on the current stream, without waiting for what is queued there.

    A copy from ordinary memory waits: behind a queued training step, for the whole of it.
    """
    return values if device.type == "cpu" else values.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True)
class InFlight:
    """A batch whose copy to the GPU has been started."""

    host: HostBatch
    """Keeps the host memory until the copy is done."""
    images: torch.Tensor
    """(n, H, W, 3) uint8 on the device."""
    labels: torch.Tensor | None
    """On the device."""
    copied: Any
    """The CUDA event after the copies, or None on the CPU."""


class DeviceStage:
    """Moves batches to the device on a side stream and finishes them on the caller's stream."""

    def __init__(self, spec: PipelineSpec, *, pinned: bool) -> None:
        """Prepare constants on the device.

        Args:
            spec: What is asked for.
            pinned: Whether delivered host tensors lie in page-locked memory.
        """
        self._device = torch.device(spec.device)
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._copying: list[InFlight] = []
        self._finish = BatchFinish(spec, pinned=pinned)
        self._pinned = pinned

    def send(self, host: HostBatch) -> InFlight:
        """Start the copy of a batch; returns at once on CUDA with page-locked memory."""
        images = torch.from_numpy(host.images)
        labels = None if host.labels is None else torch.from_numpy(host.labels)
        if self._stream is None:
            if labels is not None and self._pinned:
                labels = labels.pin_memory()
            return InFlight(host, images, labels, None)
        with torch.cuda.stream(self._stream):
            on_device = images.to(self._device, non_blocking=True)
            labels_on_device = None if labels is None else to_device(labels, self._device)
            copied = torch.cuda.Event()
            copied.record(self._stream)
        return InFlight(host, on_device, labels_on_device, copied)

    def receive(self, flight: InFlight) -> Batch:
        """Finish a batch for the caller's current stream."""
        if flight.copied is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(flight.copied)
            flight.images.record_stream(stream)  # allocated on the side stream, used on this one
            if flight.labels is not None:
                flight.labels.record_stream(stream)
            # The host buffer must outlive the copy, which may still be queued behind the caller's work.
            self._copying = [f for f in self._copying if not f.copied.query()]
            self._copying.append(flight)
        images = self._finish(flight.images, flight.host.ids, flight.host.epoch)
        return Batch(images, flight.labels, torch.from_numpy(flight.host.ids))

    def drain(self) -> None:
        """Wait for copies in flight, so that host buffers may be freed or reused."""
        for flight in self._copying:
            flight.copied.synchronize()
        self._copying.clear()


class BatchFinish:
    """Colour, normalisation, erasing, dtype and layout of a uint8 batch."""

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
        self._levels: LevelTable | None = None
        as_loaded = spec.dtype == "uint8" and spec.memory_format == "channels_last"
        if device.type == "cpu" and not spec.recipe.color and not as_loaded:
            levels = torch.arange(256, dtype=torch.uint8).repeat(3).view(1, 3, 1, 256)
            self._levels = LevelTable(self._computed(levels, np.empty(0, np.int64), 0).view(3, 256), spec, self._pinned)

    def __call__(self, images: torch.Tensor, ids: NDArray[np.int64], epoch: int) -> torch.Tensor:
        """Return the delivered images.

        Args:
            images: (n, H, W, 3) uint8 on the target device. May be delivered as it is (uint8, channels_last).
            ids: (n,) int64 sample ids.
            epoch: The epoch's number.

        Returns:
            (n, 3, H, W) of the asked dtype and memory format.
        """
        spec, recipe = self._spec, self._spec.recipe
        if self._levels is not None:
            out = self._levels(images)
        elif images.is_cpu:  # a picture at a time stays in the processor's cache: 24 ms became 3.6
            one_by_one = zip(images.permute(0, 3, 1, 2).split(1), np.split(ids, len(ids)), strict=True)
            out = torch.cat([self._computed(picture, number, epoch) for picture, number in one_by_one])
        else:
            out = self._computed(images.permute(0, 3, 1, 2), ids, epoch)
        if recipe.erasing is not None:
            out = _erased(out, recipe.erasing, keys(spec.seed, epoch, ids, STREAM_ERASING))
        order = torch.channels_last if spec.memory_format == "channels_last" else torch.contiguous_format
        out = out.contiguous(memory_format=order)
        return out.pin_memory() if self._pinned and not out.is_pinned() else out

    def _computed(self, out: torch.Tensor, ids: NDArray[np.int64], epoch: int) -> torch.Tensor:
        """Return (n, 3, H, W) uint8 pictures after colour and normalisation, in the asked dtype."""
        spec, recipe = self._spec, self._spec.recipe
        if recipe.color:
            unit = out.float().div_(255)
            for place, transform in enumerate(recipe.color):
                unit = _colored(unit, transform, keys(spec.seed, epoch, ids, STREAM_COLOR + place))
            out = unit.mul_(255)
        if spec.dtype == "uint8":
            return out.round_().clamp_(0, 255).to(torch.uint8) if recipe.color else out
        return self._normalized(out)

    def _normalized(self, levels: torch.Tensor) -> torch.Tensor:
        """Return (n, 3, H, W) levels, 0..255, scaled and shifted, in the asked dtype."""
        # float32 first: in half precision 255 grey levels times the scale would round twice.
        return torch.addcmul(self._shift, levels.float(), self._scale).to(self._dtype)


def _colored(
    unit: torch.Tensor, transform: ColorJitter | RandomGrayscale, sample_keys: NDArray[np.uint64]
) -> torch.Tensor:
    """Apply one colour transform to (n, 3, H, W) float32 in 0..1."""
    if isinstance(transform, RandomGrayscale):
        chosen = uniforms(sample_keys, 1)[:, 0] < transform.p
        where = to_device(torch.from_numpy(chosen), unit.device).view(-1, 1, 1, 1)
        return torch.where(where, _luma(unit), unit)
    draws = uniforms(sample_keys, 8)
    order = draws[:, :4].argsort(axis=1)
    factors = np.stack(
        [
            _between(draws[:, 4], jitter_range(transform.brightness, centre=1.0)),
            _between(draws[:, 5], jitter_range(transform.contrast, centre=1.0)),
            _between(draws[:, 6], jitter_range(transform.saturation, centre=1.0)),
            _between(draws[:, 7], jitter_range(transform.hue, centre=0.0)),
        ],
        axis=1,
    )
    neutral = np.array([1.0, 1.0, 1.0, 0.0])
    active = [c for c in range(4) if not np.all(factors[:, c] == neutral[c])]
    for turn in range(4):
        for change in active:
            chosen = order[:, turn] == change
            if chosen.any():
                rows = to_device(torch.from_numpy(np.flatnonzero(chosen)), unit.device)
                values = torch.from_numpy(factors[chosen, change].astype(np.float32))
                values = to_device(values, unit.device).view(-1, 1, 1, 1)
                unit[rows] = _CHANGES[change](unit[rows], values)
    return unit


def _between(draw: NDArray[np.float64], bounds: tuple[float, float]) -> NDArray[np.float64]:
    return bounds[0] + (bounds[1] - bounds[0]) * draw


def _luma(unit: torch.Tensor) -> torch.Tensor:
    r, g, b = unit.unbind(1)
    return (_LUMA[0] * r + _LUMA[1] * g + _LUMA[2] * b).unsqueeze(1)


def _brightness(unit: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return (unit * factor).clamp_(0, 1)


def _contrast(unit: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    mean = _luma(unit).mean(dim=(1, 2, 3), keepdim=True)
    return (unit * factor + mean * (1 - factor)).clamp_(0, 1)


def _saturation(unit: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return (unit * factor + _luma(unit) * (1 - factor)).clamp_(0, 1)


def _hue(unit: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """Turn the hue by `shift` of the colour circle (the HSV hexcone, as torchvision's adjust_hue)."""
    high, low = unit.amax(1), unit.amin(1)
    chroma = high - low
    r, g, b = unit.unbind(1)
    safe = torch.where(chroma == 0, torch.ones_like(chroma), chroma)
    sector = torch.where(
        high == r, ((g - b) / safe) % 6, torch.where(high == g, (b - r) / safe + 2, (r - g) / safe + 4)
    )
    sector = torch.where(chroma == 0, torch.zeros_like(sector), sector)
    turned = (sector / 6 + shift.view(-1, 1, 1)) % 1.0 * 6
    # Each channel as value - chroma * max(0, min(k, 4 - k, 1)), k = (n + sector) mod 6 with n = 5, 3, 1 for R, G, B.
    channels = []
    for n in (5.0, 3.0, 1.0):
        k = (n + turned) % 6
        channels.append(high - chroma * torch.minimum(k, 4 - k).clamp(0, 1))
    return torch.stack(channels, dim=1)


_CHANGES = (_brightness, _contrast, _saturation, _hue)


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
