"""The "torchvision" backend with ``decode="cuda"`` without a GPU: a host decoder, and the kernels or a stand-in.

With Triton's interpreter all but nvJPEG itself and the streams is the code that runs on a GPU. But it takes tens of
milliseconds a picture; so what does not look at pixels uses a resize by the CPU's, from the same records.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from fastdata.backends import _gpu_resize
from fastdata.backends._finish import BatchFinish
from fastdata.backends.tvio import TorchvisionPipeline
from fastdata.decode import decode_torchvision
from fastdata.errors import DecodeError
from fastdata.resample import Axis, read_range, resample_into
from fastdata.sources import IndexedSource
from fastdata.spec import Execution, PipelineSpec
from tests.pictures import frame_header


def interpret_kernels() -> None:
    """Import the kernels for Triton's interpreter, which runs them on tensors of the CPU."""
    if "fastdata.backends._gpu_kernels" in sys.modules:
        return
    import triton.language  # noqa: F401 - its own functions stay what they are for the rest of this process

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
    """Decodes as torchvision does on a GPU: a list at a time, channel after channel, all or an error.

    And no better: a gray JPEG with sampling factors other than 1 x 1 becomes noise, another each time. Encoded bytes
    are overwritten on return, when their memory is free.
    """

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.repeats_chroma = False
        """Whether chroma samples are repeated, as nvJPEG does, and not interpolated."""
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
                pixels = _decode_repeating(data) if self.repeats_chroma else decode_torchvision(data)
            except DecodeError as error:
                raise RuntimeError(f"Error while decoding JPEG images: {error.found}") from error
            own = torch.from_numpy(pixels).permute(2, 0, 1).contiguous()
            if _is_odd_gray(data):
                own = torch.randint(0, 256, own.shape, dtype=torch.uint8)
            pictures.append(own if fault is None else fault)
        for jpeg in jpegs:
            jpeg.fill_(0xAA)
        return pictures


def _decode_repeating(data: bytes) -> NDArray[np.uint8]:
    import simplejpeg

    return np.asarray(simplejpeg.decode_jpeg(data, "RGB", fastdct=False, fastupsample=True))


def _is_odd_gray(data: bytes) -> bool:
    start = frame_header(data)
    return data[start + 9] == 1 and data[start + 11] != 0x11


class HostResize:
    """Does with records what the kernels do, by the CPU's resize."""

    def __init__(self, spec: PipelineSpec) -> None:
        self._size = spec.recipe.output_size
        final = not spec.recipe.color and spec.recipe.erasing is None
        self._finish = BatchFinish(spec) if final else None

    def warm_up(self) -> None:
        pass

    def __call__(self, records: NDArray[np.int64]) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        out = np.empty((len(records), *self._size, 3), np.uint8)
        for record, picture in zip(records.tolist(), out, strict=True):
            _resize_one(dict(zip(_gpu_resize.FIELDS, record, strict=True)), picture)
        images = torch.from_numpy(out)
        if self._finish is None:
            return images.permute(0, 3, 1, 2), ()
        return self._finish(images, np.zeros(len(records), np.int64), 0), ()


def _resize_one(record: dict[str, int], out: NDArray[np.uint8]) -> None:
    names = ("rows", "columns")
    axes = [
        Axis(0, record[f"{name}_length"], record[f"{name}_full"], record[f"{name}_first"], size)
        for name, size in zip(names, out.shape, strict=False)
    ]
    begins, ends = zip(*map(read_range, axes), strict=True)
    steps = [record[f"{name}_stride"] for name in names]
    address = record["address"] + sum(begin * step for begin, step in zip(begins, steps, strict=True))
    shape = (ends[0] - begins[0], ends[1] - begins[1], 3)
    strides = (*steps, record["plane"])
    spans = [(count - 1) * stride for count, stride in zip(shape, strides, strict=True)]
    before, after = -sum(min(0, span) for span in spans), sum(max(0, span) for span in spans)
    memory = (ctypes.c_uint8 * (before + after + 1)).from_address(address - before)
    pixels: NDArray[np.uint8] = np.ndarray(shape, np.uint8, memory, before, strides)
    resample_into(np.ascontiguousarray(pixels), begins, *axes, out, flip=bool(record["flip"]))


class StandInPipeline(TorchvisionPipeline):
    """Open it as ``backend="tests.cuda_stand_in:StandInPipeline"``."""

    name = "tests.cuda_stand_in:StandInPipeline"
    decoders: ClassVar[list[HostDecoder]] = []
    """Of all pipelines, in the order of their opening."""
    interpreted: ClassVar[bool] = False
    """Whether the kernels themselves run."""
    repeats_chroma: ClassVar[bool] = False
    """As in `HostDecoder`."""

    def __init__(self, source: IndexedSource, spec: PipelineSpec, execution: Execution) -> None:
        super().__init__(source, spec, execution)
        if self._gpu is not None and not self.interpreted:
            self._gpu._resize = HostResize(spec)  # type: ignore[assignment]

    def _gpu_decoder(self, device: str) -> HostDecoder:
        assert device == "cpu"
        if not torch.cuda.is_available():  # there the kernels themselves are needed
            interpret_kernels()
        self.decoders.append(HostDecoder())
        self.decoders[-1].repeats_chroma = self.repeats_chroma
        return self.decoders[-1]


class InterpretedPipeline(StandInPipeline):
    """The same with the kernels."""

    interpreted = True


class RepeatingPipeline(StandInPipeline):
    """What is expected of nvJPEG: libjpeg's pixels, but for chroma samples that are repeated."""

    repeats_chroma = True
