"""Decoding on the GPU with torchvision (nvJPEG): threads read and cut, one thread decodes and starts the resize.

Threads of the host read files, look at each, cut crop-ready ones to their window and lay the bytes out. A thread of its
own gives each batch to the decoder, which returns when the pixels lie on the device and does not hold the interpreter
meanwhile, and starts the resize on a side stream. What the decoder must not take, or fails on, is loaded by the
reference in its final size and joins its batch there.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, wait
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from fastdata.backends._finish import BatchFinish
from fastdata.backends._gpu_host import HostStage, Prepared
from fastdata.backends._gpu_resize import FIELDS, GpuResize, describe_finished
from fastdata.backends._transfer import to_device
from fastdata.batch import Batch, Skipped
from fastdata.errors import BackendUnavailableError, WorkerError
from fastdata.pipeline import EpochPlan, StepPlan
from fastdata.sources import IndexedSource
from fastdata.spec import Execution, PipelineSpec
from fastdata.threads import WorkerThreads

Decode = Callable[[list[torch.Tensor]], list[torch.Tensor]]
"""Turns JPEGs, (bytes,) uint8 in host memory, into (3, h, w) uint8 RGB as stored, complete on the device on return.
Raises RuntimeError, without partial results, where it fails on one of them."""

_CHUNK_SAMPLES: Final = 32
_RESIZING: Final = 2
"""Batches whose decoded pictures may lie on the device while their resize runs."""
_NO_PICTURE_FAULTS: Final = ("out of memory", "CUDA error", "nitialize", "not compiled", "o kernel image")
"""In a decoder's message: the fault lies not in a picture."""


@dataclass(frozen=True)
class Flight:
    """A batch whose resize has been started."""

    images: torch.Tensor | None
    """(n, 3, H, W) on the device, final or uint8; None where nothing is left."""
    labels: torch.Tensor | None
    """On the device."""
    ids: NDArray[np.int64]
    """(n,)."""
    epoch: int
    """The epoch's number, for draws."""
    resized: Any
    """The CUDA event after all that, or None on the CPU."""
    failed: tuple[Skipped, ...]
    """Samples that nothing can load."""
    fallbacks: Counter[str]
    """Samples that the reference loaded, by reason."""


@dataclass
class DecodeCosts:
    """Where the time of an epoch goes."""

    batches: int = 0
    """Batches decoded."""
    prepare_s: float = 0.0
    """Seconds of all host threads together: read, look, cut, and the reference's work."""
    waited_s: float = 0.0
    """Seconds that the decoding thread waited for them."""
    decode_s: float = 0.0
    """Seconds inside the decoder."""
    launch_s: float = 0.0
    """Seconds to describe and start the resize."""


class GpuDecoder:
    """Turns plans into batches on the device."""

    def __init__(
        self, source: IndexedSource, spec: PipelineSpec, execution: Execution, decode: Decode, owner: object = None
    ) -> None:
        """Prepare; start no thread yet.

        Args:
            source: Where encoded pictures come from.
            spec: What is asked for.
            execution: How fast.
            decode: The decoder.
            owner: As of `WorkerThreads`.

        Raises:
            BackendUnavailableError: Triton is missing.
        """
        unfinished = bool(spec.recipe.color) or spec.recipe.erasing is not None
        self.costs = DecodeCosts()
        self._resize = GpuResize(spec, finish=not unfinished)
        self._finish = BatchFinish(spec) if unfinished else None
        self._source, self._spec, self._execution = source, spec, execution
        self._decode = decode
        self._host = HostStage(source, spec, pin_memory=execution.pin_memory)
        self._pool = WorkerThreads(execution.workers, "fastdata-load", owner) if execution.workers else None
        self._device = torch.device(spec.device)
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._resizing: deque[tuple[Any, Any]] = deque()
        self._warm = False

    def flights(self, plan: EpochPlan) -> Generator[Flight, None, None]:
        """Yield each step of a plan, in order. Runs in one thread; the host's work runs ahead in others."""
        self.costs = DecodeCosts()
        self._settle()
        ahead = self._execution.prefetch if self._pool else 0
        waiting: deque[tuple[StepPlan, list[Future[tuple[Prepared, float]]]]] = deque()
        with closing(iter(plan)) as steps:
            try:
                while True:
                    while len(waiting) <= ahead and (step := next(steps, None)) is not None:
                        waiting.append((step, self._submit(step)))
                    if not waiting:
                        return
                    if not self._warm:  # while the host prepares the first batches
                        with self._on_stream():
                            self._resize.warm_up()
                        self._warm = True
                    flight = self._fly(*waiting[0])
                    waiting.popleft()
                    yield flight
            finally:
                for _, futures in waiting:
                    wait([future for future in futures if not future.cancel()])
                self._settle()  # before flights that nobody wants are freed: see `_launch`

    def receive(self, flight: Flight) -> Batch | None:
        """Finish a batch for the caller's current stream."""
        images, labels = flight.images, flight.labels
        if images is None:
            return None
        if flight.resized is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(flight.resized)
            images.record_stream(stream)  # allocated on the side stream, used on this one
            if labels is not None:
                labels.record_stream(stream)
        if self._finish is not None:
            images = self._finish(images.permute(0, 2, 3, 1), flight.ids, flight.epoch)
        return Batch(images, labels, torch.from_numpy(flight.ids))

    def close(self) -> None:
        """End the threads, wait for the device and free the memory. Idempotent."""
        if self._pool is not None:
            self._pool.shutdown()
        self._settle()
        self._host.clear()

    def _submit(self, step: StepPlan) -> list[Future[tuple[Prepared, float]]]:
        bounds = [(at, min(at + _CHUNK_SAMPLES, len(step.ids))) for at in range(0, len(step.ids), _CHUNK_SAMPLES)]
        if self._pool is not None:
            return [self._pool.submit(self._host.prepare, step, *part) for part in bounds]
        done: list[Future[tuple[Prepared, float]]] = []
        for part in bounds:
            future: Future[tuple[Prepared, float]] = Future()
            future.set_result(self._host.prepare(step, *part))
            done.append(future)
        return done

    def _fly(self, step: StepPlan, futures: list[Future[tuple[Prepared, float]]]) -> Flight:
        costs, clock = self.costs, time.perf_counter
        started = clock()
        results = [future.result() for future in futures]
        parts = [prepared for prepared, _ in results]
        costs.prepare_s += sum(seconds for _, seconds in results)
        costs.waited_s += clock() - started
        with self._on_stream():
            self._free_resized(_RESIZING)
            started = clock()
            decoded, broken = self._decode_parts(parts)
            costs.decode_s += clock() - started
            self._host.give_back(parts)
            started = clock()
            flight = self._launch(step, parts, decoded, broken)
            costs.launch_s += clock() - started
        costs.batches += 1
        return flight

    def _decode_parts(self, parts: list[Prepared]) -> tuple[dict[int, torch.Tensor], dict[int, str]]:
        """Decode a step's JPEGs: pictures by place, and why others could not be decoded."""
        jpegs = [jpeg for part in parts for jpeg in part.jpegs]
        places = [place for part in parts for place in part.taken.tolist()]
        sizes = [size for part in parts for size in part.boxes[:, 2:].tolist()]
        pictures, broken = decode_each(self._decode, jpegs)
        for index, picture in enumerate(pictures):
            # A picture of another size than its header says would be read beyond its end.
            if picture is not None and list(picture.shape) != [3, *sizes[index]]:
                broken[index] = (
                    f"decoded to {tuple(picture.shape)} instead of (3, {sizes[index][0]}, {sizes[index][1]})"
                )
        decoded = {
            place: picture
            for index, (place, picture) in enumerate(zip(places, pictures, strict=True))
            if picture is not None and index not in broken
        }
        return decoded, {places[index]: f"torchvision's CUDA decoder: {found}" for index, found in broken.items()}

    def _launch(
        self, step: StepPlan, parts: list[Prepared], decoded: dict[int, torch.Tensor], broken: dict[int, str]
    ) -> Flight:
        """Start the resize of what is decoded and what is finished, in the step's order."""
        records = np.zeros((len(step.ids), len(FIELDS)), np.int64)
        for part in parts:
            records[part.taken] = part.records
        places = np.fromiter(decoded, np.int64, len(decoded))
        records[places, 0] += np.fromiter((p.data_ptr() for p in decoded.values()), np.int64, len(decoded))
        fallbacks = sum((part.fallbacks for part in parts), Counter[str]())
        finished = [part.finished for part in parts]
        if broken:
            self._host.refuse(step, broken)
            repaired, reasons = self._host.finish(step, broken)
            finished.append(repaired)
            fallbacks += reasons
        by_reference = np.concatenate([part.places for part in finished])
        uploaded = None
        if len(by_reference):
            pictures = np.concatenate([part.pictures for part in finished])
            uploaded = torch.from_numpy(pictures).to(self._device)
            records[by_reference] = describe_finished(len(by_reference), self._spec.recipe.output_size)
            records[by_reference, 0] += uploaded.data_ptr()
        failed = dict(sorted(failure for part in finished for failure in part.failed))
        failures = (*step.lost, *failed.values())
        kept = np.setdiff1d(np.arange(len(step.ids)), np.fromiter(failed, np.int64, len(failed)))
        ids = np.ascontiguousarray(step.ids[kept])
        if not len(kept):
            return Flight(None, None, ids, step.epoch, None, failures, fallbacks)
        images, borrowed = self._resize(records[kept])
        labels = self._upload_labels(step.positions[kept])
        resized = None
        if self._stream is not None:
            resized = torch.cuda.Event()
            resized.record(self._stream)
            # The decoder writes from a stream of its own, which waits for no other, and its hardware path as soon as it
            # is called (github.com/pytorch/vision/pull/9606): memory that this stream has not done with must not go
            # back to the allocator, which would give it to the decoder.
            self._resizing.append((resized, (decoded, uploaded, borrowed)))
        return Flight(images, labels, ids, step.epoch, resized, failures, fallbacks)

    def _upload_labels(self, positions: NDArray[np.int64]) -> torch.Tensor | None:
        if self._source.labels is None:
            return None
        labels = torch.from_numpy(np.ascontiguousarray(self._source.labels[positions]))
        return to_device(labels, self._device)

    def _free_resized(self, keep: int) -> None:
        """Free decoded pictures whose resize is done; wait where more than `keep` batches of them lie there."""
        while self._resizing and (len(self._resizing) > keep or self._resizing[0][0].query()):
            self._resizing.popleft()[0].synchronize()

    def _settle(self) -> None:
        """Wait for all that was started, so that every byte may be freed or reused."""
        if self._stream is not None:
            self._stream.synchronize()
            self._resizing.clear()

    def _on_stream(self) -> contextlib.AbstractContextManager[Any]:
        if self._stream is None:
            return contextlib.nullcontext()
        stack = contextlib.ExitStack()  # both are state of this thread alone
        stack.enter_context(torch.cuda.device(self._device))
        stack.enter_context(torch.cuda.stream(self._stream))
        return stack


class RunAhead:
    """A thread that runs a generator of flights some ahead of who iterates this."""

    def __init__(self, flights: Generator[Flight, None, None], ahead: int) -> None:
        """Start.

        Args:
            flights: Nobody else may touch it any more.
            ahead: Flights that may lie ready.
        """
        self._flights = flights
        self._ahead = ahead
        self._ready: deque[Flight] = deque()
        self._changed = threading.Condition()
        self._stopped = False
        self._ended = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="fastdata-gpu-decode", daemon=True)
        self._thread.start()

    def __iter__(self) -> RunAhead:
        """Return this."""
        return self

    def __next__(self) -> Flight:
        """Return the next flight.

        Raises:
            Exception: What the generator raised, after all flights before it.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._ended)
            if self._ready:
                self._changed.notify_all()
                return self._ready.popleft()
        if self._error is not None:
            raise self._error
        raise StopIteration

    def close(self) -> None:
        """End the thread and the generator. Idempotent."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._thread is not threading.current_thread():  # where the garbage collector runs in it
            self._thread.join()
        self._ready.clear()

    def _run(self) -> None:
        try:
            with closing(self._flights) as flights:
                for flight in flights:
                    with self._changed:
                        self._ready.append(flight)
                        self._changed.notify_all()
                        self._changed.wait_for(lambda: self._stopped or len(self._ready) < self._ahead)
                        if self._stopped:
                            return
        except BaseException as exc:  # handed to the consumer, who raises it
            self._error = exc
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()


def decode_each(decode: Decode, jpegs: list[torch.Tensor]) -> tuple[list[torch.Tensor | None], dict[int, str]]:
    """Decode a list, and where the decoder fails on it, its halves, down to the pictures that are at fault.

    Returns:
        Pictures, None where there is none; and why, by index.

    Raises:
        WorkerError: The decoder fails for a reason that lies in no picture.
    """
    if not jpegs:
        return [], {}
    try:
        return list(decode(jpegs)), {}
    except (RuntimeError, ValueError) as exc:
        found = str(exc).strip().partition("\n")[0]
        if any(fault in found for fault in _NO_PICTURE_FAULTS):
            remedy = 'If memory ran out, use a smaller batch size. Else decode on the CPU: decode="host".'
            raise WorkerError("torchvision's CUDA decoder", found, "decoded pictures", remedy) from exc
        if len(jpegs) == 1:
            return [None], {0: found}
    half = len(jpegs) // 2
    pictures, broken = decode_each(decode, jpegs[:half])
    others, more = decode_each(decode, jpegs[half:])
    return pictures + others, broken | {half + index: reason for index, reason in more.items()}


def nvjpeg_decoder(device: str) -> Decode:
    """Return torchvision's decoder for a GPU.

    Args:
        device: "cuda:N".

    Raises:
        BackendUnavailableError: There is no such GPU, or this torchvision does not decode on it.
    """
    advice = 'Install torch and torchvision as CUDA builds of one release, or use decode="host".'
    if not torch.cuda.is_available():
        raise BackendUnavailableError(f'device="{device}"', "torch finds no CUDA device here", "", advice)
    target = torch.device(device)
    if target.index >= torch.cuda.device_count():
        found = f"torch finds {torch.cuda.device_count()} CUDA devices"
        raise BackendUnavailableError(f'device="{device}"', found, "an index below that")
    import torchvision

    try:
        import torchvision.io  # registers the operator

        operator = torch.ops.image.decode_jpegs_cuda
    except (ImportError, AttributeError) as exc:
        found = f"torchvision {torchvision.__version__} without a JPEG decoder for CUDA: {exc}"
        raise BackendUnavailableError("torchvision", found, "the operator image::decode_jpegs_cuda", advice) from exc
    if getattr(torchvision.version, "cuda", None) is None:
        raise BackendUnavailableError("torchvision", f"{torchvision.__version__}, a build without CUDA", "", advice)
    rgb = 3  # ImageReadMode.RGB

    def decode(jpegs: list[torch.Tensor]) -> list[torch.Tensor]:
        # The operator itself: the function around it warns at each call from torchvision 0.29 on. It allocates on the
        # current stream, decodes on one of its own, and has waited for that one when it returns.
        try:
            decoded: list[torch.Tensor] = operator(jpegs, rgb, target)
        except RuntimeError:
            # It does not wait when it fails, and what it has begun may still write to memory that is free by now.
            torch.cuda.synchronize(target)
            raise
        return decoded

    return decode
