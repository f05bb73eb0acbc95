"""Moves batches of uint8 pictures from the host to the target device, ahead of the caller."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fastdata.backends._finish import BatchFinish
from fastdata.backends._transfer import to_device
from fastdata.batch import Batch
from fastdata.spec import PipelineSpec


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
