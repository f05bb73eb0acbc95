"""The DALI graph, from encoded pictures to finished batches, and the calls that run it.

One graph for training and evaluation: decode the window, resize the wanted region of it to the output size, mirror,
normalise. All of DALI's API that this package uses is called here.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.utils.dlpack
from numpy.typing import NDArray

from fastdata.spec import DaliOptions, PipelineSpec

_LOG_LEVEL = "DALI_NVIMGCODEC_LOG_LEVEL"
_SAMPLE_NUMBER = re.compile(r"decode sample #(\d+)")
_CAUSE = re.compile(
    r"(?:.*encountered:)?(.*?)(?:C\+\+ context:|Stacktrace|Current pipeline object is no longer valid|$)", re.DOTALL
)
"""What DALI found, behind its description of the operator, which always names the operator and quotes our own code."""
_MACHINE = re.compile(
    r"out of memory|bad_alloc|MemoryError|(?:can't|cannot|not|failed to) allocate"
    r"|CUDA (?:allocation|error|runtime|driver)|cudaError|CUDA_ERROR|nvImageCodec failure: '#(?:5|15|21)'",
    re.IGNORECASE,
)
"""Memory and CUDA, in the words of DALI 2.4 and torch. The numbers are nvImageCodec's allocator failure, that of its
extensions and their CUDA call error (``nvimgcodecStatus_t`` in nvimgcodec.h).
"""
_CAUSE_CHARACTERS = 300
_DTYPES = {"float32": "FLOAT", "float16": "FLOAT16", "bfloat16": "FLOAT", "uint8": "UINT8"}
"""DALI's type for each of ours. DALI has no bfloat16 output; from float32 it is one rounding, as everywhere."""


class GraphError(Exception):
    """DALI failed.

    Attributes:
        cause: What DALI found, in one line, without its description of the operator.
        samples: Places in the batch that DALI named; empty where it named none.
        by_pictures: Whether the pictures of the run may be at fault; else it is memory, the driver or the graph itself.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        told = _CAUSE.match(message)
        cause = " ".join((told[1] if told else message).split()).rstrip(" :")
        self.cause = (cause or message)[:_CAUSE_CHARACTERS]
        self.samples = frozenset(int(number) for number in _SAMPLE_NUMBER.findall(cause))
        running = "encountered:" in message or "nvImageCodec" in cause or "decode" in cause
        self.by_pictures = running and _MACHINE.search(cause) is None


@dataclass(frozen=True)
class GraphInputs:
    """What one run of the graph gets. DALI reads `encoded` in place: it must stay untouched until the run is over."""

    encoded: NDArray[np.uint8] | list[NDArray[np.uint8]]
    """(n, longest) uint8, each row one encoded picture and zeros; or a list of n arrays of (bytes,) uint8."""
    start: NDArray[np.int32]
    """(n, 2) first row and column of the window, in pixels of the oriented picture that `encoded` holds."""
    shape: NDArray[np.int32]
    """(n, 2) height and width of the window."""
    region_start: NDArray[np.float32]
    """(n, 2) row and column of the window where the region that is resized to the output begins."""
    region_end: NDArray[np.float32]
    """(n, 2) row and column where it ends."""
    mirror: NDArray[np.int32]
    """(n,) 1 where the output is mirrored left and right."""

    def alone(self, place: int) -> GraphInputs:
        """Return the inputs of one sample, which share memory with these."""
        one = slice(place, place + 1)
        return GraphInputs(
            self.encoded[one],
            self.start[one],
            self.shape[one],
            self.region_start[one],
            self.region_end[one],
            self.mirror[one],
        )


@dataclass(frozen=True)
class GraphSettings:
    """What decides the graph's form."""

    spec: PipelineSpec
    """What is asked for."""
    options: DaliOptions
    """How fast."""
    threads: int
    """DALI's CPU threads."""
    raw: bool
    """Whether the graph ends with uint8 pictures in (n, H, W, 3), which another stage finishes."""

    @property
    def device_id(self) -> int | None:
        """The GPU's number, or None on the CPU."""
        return None if self.spec.device == "cpu" else int(self.spec.device.removeprefix("cuda:"))

    @property
    def whole_decode(self) -> bool:
        """Whether whole pictures are decoded, then cropped: nvJPEG cannot interpolate chroma of a window alone."""
        return not self.options.region_decode or self.exact_chroma

    @property
    def exact_chroma(self) -> bool:
        """Whether the GPU must be told to interpolate chroma; the CPU does it always."""
        return self.device_id is not None and self.options.chroma == "exact"

    @property
    def has_region(self) -> bool:
        """Whether the window is wider than what is resized. A training recipe resizes the window itself."""
        return self.spec.recipe.crop is None

    @property
    def dtype(self) -> str:
        """DALI's name of the output type."""
        return "UINT8" if self.raw else _DTYPES[self.spec.dtype]

    @property
    def layout(self) -> str:
        """The layout in memory."""
        return "HWC" if self.raw or self.spec.memory_format == "channels_last" else "CHW"


class DaliGraph:
    """A DALI pipeline, built when it is first needed. Used by one thread; runs come out in the order they went in.

    What goes wrong is told by `receive` and `drain` alone, in the turn of the run that it befell. Then everything
    behind it is lost too; after `close` the next `start` builds afresh.
    """

    def __init__(self, settings: GraphSettings) -> None:
        """Note the graph's form; nothing is built yet.

        Args:
            settings: The graph's form.
        """
        self._settings = settings
        self._pipe: Any = None
        self._running = 0
        self._failure: GraphError | None = None

    def start(self, inputs: GraphInputs) -> None:
        """Start one run; returns at once. At most ``options.queue_depth`` may be running.

        The first one builds the graph and runs it once on blank pictures.
        """
        if self._failure is not None:
            return  # the runs before come first; whoever receives them learns of it
        try:
            with _mapped_errors():
                if self._pipe is None:
                    self._pipe = _build(self._settings)
                _feed(self._pipe, self._settings, inputs)
                self._pipe.schedule_run()
        except GraphError as error:
            error.by_pictures = False  # nothing has been decoded
            self._failure = error.with_traceback(None)  # its frames hold the inputs
            return
        self._running += 1

    def receive(self) -> torch.Tensor:
        """Wait for the oldest run and return its pictures.

        Returns:
            (n, 3, H, W) of the settings' dtype and layout on the device; or (n, H, W, 3) uint8 where `raw`. On a GPU it
            is torch's own memory, ready on the caller's current stream; on the CPU it is DALI's, held by the tensor.

        Raises:
            GraphError: The graph could not be built, or the run not be started, or it failed. Later runs are lost too:
                call `close`, which frees DALI's memory, and start them again.
        """
        spec = self._settings.spec
        self._next_run()
        with _mapped_errors():
            stream = None if self._settings.device_id is None else torch.cuda.current_stream(spec.device)
            (output,) = self._pipe.share_outputs(cuda_stream=stream)
            pictures = torch.utils.dlpack.from_dlpack(output.as_tensor())
            if spec.dtype == "bfloat16" and not self._settings.raw:
                pictures = pictures.to(torch.bfloat16)
            elif stream is not None:
                # Memory that DALI owns is not known to torch's allocator: a caller who uses it on a second stream could
                # not keep it alive with record_stream. 77 MB (256 pictures in float16) take tens of microseconds.
                pictures = pictures.clone()
            del output
            self._pipe.release_outputs()
        if self._settings.layout == "HWC" and not self._settings.raw:
            return pictures.permute(0, 3, 1, 2)
        return pictures

    def drain(self) -> None:
        """Wait for all runs and drop what they made.

        Raises:
            GraphError: One of them failed; call `close`.
        """
        while self._running or self._failure is not None:
            self._next_run()
            with _mapped_errors():
                _drop_run(self._pipe)

    def close(self) -> None:
        """End DALI's threads and free its memory; runs are lost. Idempotent; the next `start` builds afresh."""
        self._pipe = None
        self._running = 0
        self._failure = None

    def _next_run(self) -> None:
        if not self._running and self._failure is not None:
            raise self._failure
        self._running -= 1


def _build(settings: GraphSettings) -> Any:
    """Build a DALI pipeline and run it once on blank pictures, so that the first batch pays nothing."""
    from nvidia.dali import Pipeline  # not installed everywhere

    pipe = Pipeline(
        batch_size=settings.spec.batch_size,
        num_threads=settings.threads,
        device_id=settings.device_id,
        prefetch_queue_depth=settings.options.queue_depth,
        exec_dynamic=True,  # outputs may be kept: they are no slots of a ring
    )
    with _quiet_codecs():
        with pipe:
            pipe.set_outputs(_define(settings))
        pipe.build()
        # DALI's first schedule_run starts queue_depth runs, so as many inputs must lie ready.
        blank = _blank_inputs(settings.spec.batch_size)
        for _ in range(settings.options.queue_depth):
            _feed(pipe, settings, blank)
        pipe.schedule_run()
        for _ in range(settings.options.queue_depth):
            _drop_run(pipe)
    return pipe


def _feed(pipe: Any, settings: GraphSettings, inputs: GraphInputs) -> None:
    pipe.feed_input("encoded", inputs.encoded)
    pipe.feed_input("start", inputs.start)
    pipe.feed_input("shape", inputs.shape)
    pipe.feed_input("mirror", inputs.mirror)
    if settings.has_region:
        pipe.feed_input("region_start", inputs.region_start)
        pipe.feed_input("region_end", inputs.region_end)


def _drop_run(pipe: Any) -> None:
    pipe.share_outputs()
    pipe.release_outputs()


def ppm(picture: NDArray[np.uint8]) -> bytes:
    """Wrap an (h, w, 3) uint8 picture as PPM, which every DALI decoder takes as it is."""
    return b"P6\n%d %d\n255\n" % (picture.shape[1], picture.shape[0]) + picture.tobytes()


def _blank_inputs(batch_size: int) -> GraphInputs:
    """Return a full batch of single pixels.

    A full one: nvImageCodec divides a batch between the JPEG engines and its other decoders by the size of the first
    batch that it ever sees, and keeps the engines' number from then on. After a first batch of one picture the engines
    got 7 of each 256, whatever ``hw_decoder_load`` says: 3.4 k img/s instead of 20 k on an H200.
    """
    zeros, ones = np.zeros((batch_size, 2)), np.ones((batch_size, 2))
    pixel = np.frombuffer(ppm(np.zeros((1, 1, 3), np.uint8)), np.uint8)
    return GraphInputs(
        np.tile(pixel, (batch_size, 1)),
        zeros.astype(np.int32),
        ones.astype(np.int32),
        zeros.astype(np.float32),
        ones.astype(np.float32),
        np.zeros(batch_size, np.int32),
    )


def _define(settings: GraphSettings) -> Any:
    from nvidia.dali import fn, types

    def given(name: str, dtype: Any, ndim: int, *, no_copy: bool = False) -> Any:
        return fn.external_source(name=name, device="cpu", dtype=dtype, ndim=ndim, no_copy=no_copy)

    spec, options = settings.spec, settings.options
    encoded = given("encoded", types.UINT8, 1, no_copy=True)
    window = {"start": given("start", types.INT32, 1), "shape": given("shape", types.INT32, 1), "axes": (0, 1)}
    decoder: dict[str, Any] = {"output_type": types.RGB, "adjust_orientation": spec.orientation == "apply"}
    if settings.device_id is None:
        decoder["device"] = "cpu"
    else:
        decoder |= {
            "device": "mixed",
            "hw_decoder_load": options.hw_decoder_load,
            "device_memory_padding": options.device_memory_padding_bytes,
            "host_memory_padding": options.host_memory_padding_bytes,
            "preallocate_height_hint": options.preallocate_size[0],
            "preallocate_width_hint": options.preallocate_size[1],
            "jpeg_fancy_upsampling": settings.exact_chroma,
        }
    if settings.whole_decode:
        pictures = fn.slice(fn.decoders.image(encoded, **decoder), **window)
    else:
        pictures = fn.decoders.image_slice(encoded, **window, **decoder)
    region = {}
    if settings.has_region:
        region = {
            "roi_start": given("region_start", types.FLOAT, 1),
            "roi_end": given("region_end", types.FLOAT, 1),
        }
    resized = fn.resize(
        pictures, size=spec.recipe.output_size, interp_type=types.INTERP_LINEAR, antialias=True, **region
    )
    mean, std = _scale(settings)
    return fn.crop_mirror_normalize(
        resized,
        mirror=given("mirror", types.INT32, 0),
        dtype=getattr(types, settings.dtype),
        output_layout=settings.layout,
        mean=mean,
        std=std,
    )


def _scale(settings: GraphSettings) -> tuple[list[float], list[float]]:
    """Return mean and std in grey levels."""
    if settings.dtype == "UINT8":
        return [0.0], [1.0]
    normalize = settings.spec.recipe.normalize
    if normalize is None:
        return [0.0], [255.0]
    return [255 * m for m in normalize.mean], [255 * s for s in normalize.std]


@contextlib.contextmanager
def _mapped_errors() -> Iterator[None]:
    """Turn what DALI raises (RuntimeError, IndexError, MemoryError, ...) into `GraphError`.

    Tracebacks are dropped: their frames keep the DALI pipeline alive, so that its successor would need as much again.
    """
    try:
        yield
    except Exception as exc:
        raise GraphError(f"{type(exc).__name__}: {exc}") from exc.with_traceback(None)


@contextlib.contextmanager
def _quiet_codecs() -> Iterator[None]:
    """Build decoders that print errors but no warnings, such as one for each picture that an engine leaves to a kernel.

    The level (1 errors .. 5 traces) is read when a decoder is built. A level that the user set stays.
    """
    if _LOG_LEVEL in os.environ:
        yield
        return
    os.environ[_LOG_LEVEL] = "1"
    try:
        yield
    finally:
        os.environ.pop(_LOG_LEVEL, None)
