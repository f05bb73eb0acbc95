"""What every backend has to know of the target device: whether torch can use it, and how small tensors get there."""

from __future__ import annotations

import torch

from fastdata.errors import BackendUnavailableError


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
