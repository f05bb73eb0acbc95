"""Who runs the loading of samples: threads, processes, or the caller. One interface, one place for their traps."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from multiprocessing.shared_memory import SharedMemory
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fastdata.backends._buffers import BufferPool
from fastdata.backends._samples import ChunkResult, SampleLoader
from fastdata.errors import UsageError, WorkerError
from fastdata.sources.streamed import HeldSamples
from fastdata.threads import WorkerThreads

_WAIT_FOR_WORKERS_S = 5.0


@dataclass(frozen=True)
class Chunk:
    """Some samples of a batch, loaded by one worker in one go."""

    epoch: int
    """The epoch's number."""
    positions: NDArray[np.int64]
    """(n,) positions in the source."""
    ids: NDArray[np.int64]
    """(n,) sample ids."""
    start: int
    """Where the chunk's first sample goes in the batch."""
    held: HeldSamples | None = None
    """The samples, where positions count in them and not in the source."""

    def load(self, loader: SampleLoader, out: NDArray[np.uint8]) -> ChunkResult:
        """Load the samples into a whole batch's memory."""
        if self.held is not None:
            loader = replace(loader, source=self.held)
        return loader.load(self.epoch, self.positions, self.ids, out[self.start : self.start + len(self.ids)])


class Slot(Protocol):
    """Memory that one batch is loaded into."""

    @property
    def array(self) -> NDArray[np.uint8]:
        """(batch_size, H, W, 3)."""
        ...


class Pool(Protocol):
    """Loads chunks into slots."""

    name: str
    """"threads", "processes" or "caller", for reports."""
    workers: int
    """Chunks loaded at a time; 0 where the caller loads them."""

    def take_slot(self) -> Slot:
        """Return memory for one batch that nothing else uses."""
        ...

    def submit(self, chunk: Chunk, slot: Slot) -> Future[ChunkResult]:
        """Load a chunk into its place of the slot."""
        ...

    def finish_slot(self, slot: Slot, count: int) -> NDArray[np.uint8]:
        """Return the first `count` pictures of a filled slot, (count, H, W, 3), as memory that may be delivered."""
        ...

    def return_slot(self, slot: Slot) -> None:
        """Take back a slot whose batch is not wanted; all its chunks are done or cancelled."""
        ...

    def close(self) -> None:
        """Stop workers and free memory. Idempotent."""
        ...


@dataclass(frozen=True)
class _LocalSlot:
    array: NDArray[np.uint8]


class CallerPool:
    """Loads in the calling thread, when asked: ``workers=0``, for debugging and tiny sets."""

    name = "caller"
    workers = 0

    def __init__(self, loader: SampleLoader, buffers: BufferPool) -> None:
        """Keep the loader and the memory it fills."""
        self._loader = loader
        self._buffers = buffers

    def take_slot(self) -> Slot:
        """Return memory for one batch."""
        return _LocalSlot(self._buffers.take())

    def submit(self, chunk: Chunk, slot: Slot) -> Future[ChunkResult]:
        """Load at once; the future is done when this returns."""
        done: Future[ChunkResult] = Future()
        done.set_result(chunk.load(self._loader, slot.array))
        return done

    def finish_slot(self, slot: Slot, count: int) -> NDArray[np.uint8]:
        """Return a view: the buffer is reused when no tensor refers to it."""
        return slot.array[:count]

    def return_slot(self, slot: Slot) -> None:
        """Do nothing: the buffer is free when nothing refers to it."""

    def close(self) -> None:
        """Forget the buffers."""
        self._buffers.clear()


class ThreadPool(CallerPool):
    """Threads of this process. Decoders, the resize and reads release the GIL, so a core each is kept busy."""

    name = "threads"

    def __init__(self, loader: SampleLoader, buffers: BufferPool, workers: int, owner: object) -> None:
        """Start no thread yet; they come with the first chunk. For `owner` see `WorkerThreads`."""
        super().__init__(loader, buffers)
        self.workers = workers
        self._threads = WorkerThreads(workers, "fastdata-load", owner)

    def submit(self, chunk: Chunk, slot: Slot) -> Future[ChunkResult]:
        """Load on the next free thread."""
        return self._threads.submit(chunk.load, self._loader, slot.array)

    def close(self) -> None:
        """Cancel what has not begun, wait for what has (milliseconds), and end the threads."""
        self._threads.shutdown()
        super().close()


class _SharedSlot:
    """A block of shared memory that processes fill."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        size = int(np.prod(shape))
        _check_shared_memory(size)
        self.memory = SharedMemory(create=True, size=size)
        self.array: NDArray[np.uint8] = np.ndarray(shape, np.uint8, buffer=self.memory.buf)

    def close(self) -> None:
        del self.array
        with contextlib.suppress(BufferError):  # a worker's exception may still hold a view; the name goes anyway
            self.memory.close()
        self.memory.unlink()


class ProcessPool:
    """Processes, for Python callables: side by side, each with random state of its own.

    They come from a fork server, which is safe after CUDA or threads were used in this process, and end with it: they
    watch their parent, and ignore SIGINT, which the parent handles. Pictures travel through shared memory and are
    copied once into a buffer of this process, so that kept batches hold neither descriptors nor ``/dev/shm``.
    """

    name = "processes"

    def __init__(
        self,
        loader: SampleLoader,
        buffers: BufferPool,
        workers: int,
        slot_shape: tuple[int, ...],
        slots: int,
        owner: object,
    ) -> None:
        """Start the workers.

        Args:
            loader: Copied to each worker.
            buffers: Memory of this process for finished batches.
            workers: Processes.
            slot_shape: (batch_size, H, W, 3).
            slots: Batches in work at a time.
            owner: As of `WorkerThreads`: the executor has a thread of its own, in which the collector may run.

        Raises:
            UsageError: The loader (a callable of the transform, usually) cannot be pickled.
            WorkerError: ``/dev/shm`` is too small.
        """
        self.workers = workers
        self._owner = owner
        self._buffers = buffers
        try:
            pickled = pickle.dumps(loader)
        except Exception as exc:
            raise UsageError(
                "transform",
                f"something that cannot be sent to a worker process ({exc})",
                "callables defined at the top level of a module",
                "Move the function out of the function around it, or pass workers=0.",
            ) from exc
        _check_shared_memory(slots * int(np.prod(slot_shape)))
        self._free: list[_SharedSlot] = []
        self._all: list[_SharedSlot] = []
        self._shape = slot_shape
        self._began = False  # whether a batch was ever loaded
        self._exit_codes: list[int] = []
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["fastdata.backends._samples", "torch"])
        self._executor = ProcessPoolExecutor(workers, context, initializer=_begin_worker, initargs=(pickled,))

    def take_slot(self) -> Slot:
        """Return shared memory for one batch."""
        if not self._free:
            slot = _SharedSlot(self._shape)
            self._all.append(slot)
            return slot
        return self._free.pop()

    def submit(self, chunk: Chunk, slot: Slot) -> Future[ChunkResult]:
        """Load on the next free process."""
        assert isinstance(slot, _SharedSlot)
        try:
            future = self._executor.submit(_load_in_worker, chunk, slot.memory.name, self._shape)
        except BrokenProcessPool as exc:
            raise self.worker_died(exc) from exc
        future.add_done_callback(self._keep_owner)
        return future

    def _keep_owner(self, _future: Future[ChunkResult]) -> None:
        """Do nothing: a call in work refers to this, and this to the owner."""

    def worker_died(self, exc: BrokenProcessPool) -> WorkerError:
        """Wait until all workers are gone, and return the error that says how the first of them ended."""
        processes = list((self._executor._processes or {}).values())
        self._executor.shutdown(wait=True, cancel_futures=True)  # its thread ends the others and collects exit codes
        if processes:
            self._exit_codes = [process.exitcode for process in processes if process.exitcode is not None]
        return _worker_error(self._exit_codes, began=self._began, exc=exc)

    def finish_slot(self, slot: Slot, count: int) -> NDArray[np.uint8]:
        """Copy into a buffer of this process and free the slot."""
        self._began = True
        buffer = self._buffers.take()
        buffer[:count] = slot.array[:count]
        self.return_slot(slot)
        return buffer[:count]

    def return_slot(self, slot: Slot) -> None:
        """Put the slot back."""
        assert isinstance(slot, _SharedSlot)
        self._free.append(slot)

    def close(self) -> None:
        """End the workers and free the shared memory."""
        processes = list((self._executor._processes or {}).values())
        self._executor.shutdown(wait=True, cancel_futures=True)
        for process in processes:
            process.join(_WAIT_FOR_WORKERS_S)
        for slot in self._all:
            slot.close()
        self._all.clear()
        self._free.clear()
        self._buffers.clear()


_START_REMEDY = (
    "A script that opens pipelines with callables needs an `if __name__ == '__main__':` guard, and its callables must "
    "be importable in a new process; the worker's own error is on standard error."
)
_CRASH_REMEDY = "Native code crashed, most likely in a library that the transform's callables use: try workers=0."
_SIGNAL_REMEDIES: Mapping[int, str] = {
    signal.SIGKILL: "The system kills processes when memory runs out: look at `dmesg`, and use fewer workers or "
    "smaller batches.",
    signal.SIGBUS: "Most likely shared memory ran out: enlarge /dev/shm (docker run --shm-size=8g), or use smaller "
    "batches.",
    signal.SIGTERM: "Somebody ended it.",
}


def _worker_error(exit_codes: list[int], *, began: bool, exc: BrokenProcessPool) -> WorkerError:
    """Return the error for a worker process that ended by itself.

    Args:
        exit_codes: Of all workers; minus a signal's number where one ended them. The pool ends the others by SIGTERM.
        began: Whether the workers loaded anything before.
        exc: What the pool says.
    """
    code = next((code for code in exit_codes if code != -signal.SIGTERM), -signal.SIGTERM if exit_codes else None)
    if code is None:
        found, remedy = f"ended ({exc})", "Look at what it wrote to standard error."
    elif code < 0:
        found, remedy = f"was ended by {_signal_name(-code)}", _SIGNAL_REMEDIES.get(-code, _CRASH_REMEDY)
    elif began:
        found = f"ended with exit code {code} in the middle of its work"
        remedy = "Look at what it wrote to standard error, and for exits in the transform's callables."
    else:
        found, remedy = f"ended with exit code {code} before it had loaded a batch", _START_REMEDY
    return WorkerError("worker process", found, "a worker that lives as long as the pipeline", remedy)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals have no names
        return f"signal {number}"


def _check_shared_memory(needed: int) -> None:
    """Refuse before the first batch what would end in a bus error in the middle of an epoch."""
    folder = "/dev/shm"
    if not os.path.isdir(folder):
        return
    stat = os.statvfs(folder)
    free = stat.f_bavail * stat.f_frsize
    if needed > free:
        raise WorkerError(
            folder,
            f"{free / 1e6:.0f} MB free",
            f"{needed / 1e6:.0f} MB for the batches in work",
            "Enlarge it (docker run --shm-size=8g), lower batch_size or prefetch, or use threads "
            '(options=fastdata.HostOptions(pool="threads")), which need none.',
        )


# One loader and the attached slots for each worker process: state of the process, which lives as long as the pool.
_worker_loader: SampleLoader | None = None
_worker_slots: dict[str, tuple[SharedMemory, NDArray[np.uint8]]] = {}


def _begin_worker(pickled: bytes) -> None:
    global _worker_loader
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True, name="fastdata-parent-watch").start()
    import torch

    torch.set_num_threads(1)
    _worker_loader = pickle.loads(pickled)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _load_in_worker(chunk: Chunk, slot_name: str, shape: tuple[int, ...]) -> ChunkResult:
    assert _worker_loader is not None
    if slot_name not in _worker_slots:
        memory = SharedMemory(name=slot_name)
        _worker_slots[slot_name] = memory, np.ndarray(shape, np.uint8, buffer=memory.buf)
    return chunk.load(_worker_loader, _worker_slots[slot_name][1])
