"""The "torchvision" backend with ``decode="cuda"`` where there is no GPU: a host decoder and Triton's interpreter.

All but nvJPEG itself and the streams is the code that runs on a GPU.
"""

from __future__ import annotations

import os
import sys
from typing import Any, ClassVar

import torch

from fastdata.backends import _gpu_resize
from fastdata.backends.tvio import TorchvisionPipeline
from fastdata.decode import decode_torchvision
from fastdata.errors import DecodeError


def interpret_kernels() -> None:
    """Import the kernels for Triton's interpreter, which runs them on tensors of the CPU."""
    if "fastdata.backends._gpu_kernels" in sys.modules:
        return
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"  # looked at when a kernel is defined
    try:
        _gpu_resize.load_kernels()
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before
    # The interpreter's cost is one of programs, not of pixels.
    _gpu_resize._PIXELS_BLOCK = 4096  # type: ignore[misc]


class HostDecoder:
    """Decodes as torchvision does on a GPU: a list at a time, channel after channel, all or an error."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.fault: Any = lambda _: None
        """What is wrong with a JPEG, as a message, or None; or a picture to return in place of its own."""

    def __call__(self, jpegs: list[torch.Tensor]) -> list[torch.Tensor]:
        self.calls.append(len(jpegs))
        pictures = []
        for jpeg in jpegs:
            assert jpeg.dtype == torch.uint8
            data = jpeg.numpy().tobytes()
            fault = self.fault(data)
            if isinstance(fault, str):
                raise RuntimeError(fault)
            try:
                own = torch.from_numpy(decode_torchvision(data)).permute(2, 0, 1).contiguous()
            except DecodeError as error:
                raise RuntimeError(f"Error while decoding JPEG images: {error.found}") from error
            pictures.append(own if fault is None else fault)
        return pictures


class StandInPipeline(TorchvisionPipeline):
    """Open it as ``backend="tests.cuda_stand_in:StandInPipeline"``."""

    decoders: ClassVar[list[HostDecoder]] = []
    """Of all pipelines, in the order of their opening."""

    def _gpu_decoder(self, device: str) -> HostDecoder:
        assert device == "cpu"
        interpret_kernels()
        self.decoders.append(HostDecoder())
        return self.decoders[-1]
