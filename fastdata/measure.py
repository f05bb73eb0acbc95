"""One measurement: opens a loader in this process, warms it up, and counts what it delivers in a window.

`fastdata.fresh` runs this module in a process of its own for every repeat, so that no run inherits threads, caches or
imports of another.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from fastdata.errors import FastDataError, UsageError
from fastdata.task import Loader, Task, load_object

Consumer = Callable[[Any], None]

MAX_TIMELINE_POINTS = 400
"""Batch waits kept for the plot: of longer windows the longest wait of each stretch."""


def open_task_pipeline(task: Task) -> Loader:
    """Open the task's data with `fastdata.open_pipeline`."""
    from fastdata.api import open_pipeline
    from fastdata.registry import load_backend
    from fastdata.spec import BlockShuffle
    from fastdata.transforms import imagenet_train

    options = None
    if task.options:
        options_type = load_backend(task.backend).options_type
        if options_type is None:
            raise UsageError("options", f"{task.options}", f'no options: backend="{task.backend}" has none')
        options = options_type(**task.options)
    pipeline = open_pipeline(
        task.data,
        backend=task.backend,
        transform=imagenet_train(task.size),
        batch_size=task.batch_size,
        device=task.device,
        dtype=cast("Any", task.dtype),
        shuffle=BlockShuffle(task.block_shards) if task.block_shards else True,
        on_error=task.on_error,
        drop_last=task.drops_last,
        workers=task.workers,
        prefetch=task.prefetch,
        options=options,
        rank=task.rank,
        world_size=task.world_size,
    )
    source, execution = pipeline.source, pipeline.execution
    return Loader(
        pipeline,
        ready_batches=execution.prefetch + 2,  # one more may be half made, one on its way to the device
        report=pipeline.report,
        close=pipeline.close,
        facts={
            "source": source.kind,
            "order": f"blocks of {task.block_shards} shards" if task.block_shards else "full permutation",
            "samples": len(source),
            "fingerprint": source.fingerprint,
            "classes": len(source.classes),
            "workers": execution.workers,
            "prefetch": execution.prefetch,
        },
    )


class Stream:
    """Batches without end: when an epoch ends the next begins, and what that costs is part of the window."""

    def __init__(self, loader: Loader, *, wrap: bool = True) -> None:
        """Start nothing yet.

        Args:
            loader: Where batches come from.
            wrap: Whether to begin another epoch at the end of one.
        """
        self._loader = loader
        self._wrap = wrap
        self._iterator: Iterator[Any] | None = None
        self._skipped = 0
        self._fallbacks: Counter[str] = Counter()
        self.waits: list[tuple[float, float]] = []
        """(time when the batch came, seconds waited) of every batch."""
        self.epoch_ends: list[float] = []
        """Seconds from the end of each epoch to the first batch of the next."""

    def next(self) -> Any:
        """Return the next batch.

        Raises:
            StopIteration: The epoch is over and `wrap` is False.
            FastDataError: An epoch gives no batch.
        """
        asked = time.perf_counter()
        if self._iterator is None:
            self._iterator = iter(self._loader.batches)
        try:
            batch = next(self._iterator)
        except StopIteration:
            if not self._wrap:
                raise
            self._add_report()
            self._iterator = iter(self._loader.batches)
            try:
                batch = next(self._iterator)
            except StopIteration:
                raise FastDataError("loader", "an epoch without a batch", "at least one batch an epoch") from None
            self.epoch_ends.append(time.perf_counter() - asked)
        came = time.perf_counter()
        self.waits.append((came, came - asked))
        return batch

    def counts(self) -> tuple[int, Counter[str]]:
        """Return samples skipped and fallbacks by reason, since the start."""
        report = self._loader.report() if self._loader.report else None
        if report is None:
            return self._skipped, Counter(self._fallbacks)
        return self._skipped + len(report.skipped), self._fallbacks + report.fallbacks

    def _add_report(self) -> None:
        self._skipped, self._fallbacks = self.counts()


def measure(task: Task) -> dict[str, Any]:
    """Run one measurement in this process and return its figures, JSON-able.

    The clock of the window starts after everything that was made ahead during start-up has been dropped, and stops
    after the last counted batch (in training: its step) is finished on the device. Ends of epochs inside it count.

    Raises:
        FastDataError: The loader fails, delivers something else than asked, or has too few batches.
    """
    from fastdata.gpu import open_gpu_meter
    from fastdata.monitor import Monitor, cores_available, machine_id
    from fastdata.ranks import Ranks
    from fastdata.training import Trainer, cached_batch, synchronise

    with Ranks.join(task.rendezvous, task.rank, task.world_size) as ranks:
        synchronise(task.device)  # starts CUDA, which is not the loader's time
        trainer = (
            Trainer(task.model, task.device, compiled=task.compiled, ranks=ranks) if task.mode != "loader" else None
        )
        constructed = time.perf_counter()
        loader = cached_batch(task) if task.mode == "synthetic" else load_object(task.loader)(task)
        try:
            stream = Stream(loader, wrap=task.cache == "warm")
            contract = _Contract(task)
            first = stream.next()
            synchronise(task.device)
            first_batch_s = time.perf_counter() - constructed
            contract.check(first)
            if trainer:
                trainer.step(first)
            del first
            with Monitor(open_gpu_meter(task.device)) as monitor:
                dropped = _warm_up(task, loader, stream, contract, trainer, ranks)
                figures = _window(task, stream, contract, trainer, ranks, monitor)
        finally:
            loader.close()
    figures |= {
        "first_batch_s": first_batch_s,
        "warmup_batches": dropped,
        "cpu_cores_available": cores_available(),
        "machine_id": machine_id(),
        "output": contract.text(),
        "facts": loader.facts,
        "training": trainer.describe() if trainer else None,
    }
    return figures


class _Contract:
    """Checks that every batch is what was asked for: all rows of a table must deliver the same kind of tensor."""

    def __init__(self, task: Task) -> None:
        self._wanted = (task.dtype, task.device, (3, task.size, task.size))
        self._layout = ""

    def check(self, batch: Any) -> int:
        """Return the batch's number of images."""
        images = next(iter(batch))
        device = str(images.device)
        found = (str(images.dtype).removeprefix("torch."), device, tuple(images.shape[1:]))
        if found != self._wanted:
            raise FastDataError("batch", f"{found}", f"{self._wanted} (dtype, device, shape of an image)")
        if not self._layout:
            import torch

            channels_last = images.is_contiguous(memory_format=torch.channels_last)
            self._layout = "channels_last" if channels_last else "contiguous"
        return int(images.shape[0])

    def text(self) -> str:
        dtype, device, shape = self._wanted
        return f"(n, {', '.join(map(str, shape))}) {dtype} {self._layout} on {device}"


def _warm_up(task: Task, loader: Loader, stream: Stream, contract: _Contract, trainer: Any, ranks: Any) -> int:
    """Drop at least all batches that were made ahead, for at least `warmup_s`; return how many were dropped."""
    seconds = 0.0 if task.cache == "cold" else task.warmup_s
    least = loader.ready_batches + (5 if trainer else 1)
    started, dropped = time.perf_counter(), 0
    try:
        while True:
            for _ in range(least):
                batch = stream.next()
                contract.check(batch)
                if trainer:
                    trainer.step(batch)
                dropped += 1
            if ranks.all_true(time.perf_counter() - started >= seconds):
                return dropped
    except StopIteration:
        raise FastDataError(
            task.data,
            f"an epoch of {dropped + 1} batches, which the warm-up of {least} uses up",
            "an epoch that is much longer, because a cold run reads each file once",
            "Use more data or a smaller batch size.",
        ) from None


def _window(task: Task, stream: Stream, contract: _Contract, trainer: Any, ranks: Any, monitor: Any) -> dict[str, Any]:
    from fastdata.training import synchronise

    agreed = _agreed_batches(task, stream, ranks)
    skipped_before, fallbacks_before = stream.counts()
    synchronise(task.device)
    ranks.barrier()
    first_wait, first_epoch_end = len(stream.waits), len(stream.epoch_ends)
    opened = time.perf_counter()
    monitor.open_window()
    images = batches = 0
    while True:
        try:
            batch = stream.next()
        except StopIteration:
            break
        images += contract.check(batch)
        batches += 1
        if trainer:
            trainer.step(batch)
        del batch
        enough = batches >= task.min_batches and time.perf_counter() - opened >= task.seconds
        if batches >= agreed if agreed else enough:
            break
    synchronise(task.device)
    closed = time.perf_counter()
    usage = monitor.close_window()
    if not batches:
        raise FastDataError(task.data, "no batch after the warm-up", "an epoch that is longer", "Use more data.")
    skipped, fallbacks = stream.counts()
    waits = stream.waits[first_wait:]
    epoch_ends = stream.epoch_ends[first_epoch_end:]
    window_s = closed - opened
    runs_ahead = trainer is not None and task.device.startswith("cuda")  # see training.WAIT_HIDDEN
    return {
        "images": images,
        "batches": batches,
        "window_s": window_s,
        "images_per_s": images / window_s,
        "data_wait_percent": None if runs_ahead else 100.0 * sum(wait for _, wait in waits) / window_s,
        "waits": thin_out([(at - opened, wait) for at, wait in waits]),
        "epoch_ends": len(epoch_ends),
        "epoch_end_s": sum(epoch_ends) / len(epoch_ends) if epoch_ends else None,
        "skipped": skipped - skipped_before,
        "fallbacks": dict(fallbacks - fallbacks_before),
        "processes": usage.processes,
        "readings": {name: asdict(reading) for name, reading in usage.readings.items()},
    }


def _agreed_batches(task: Task, stream: Stream, ranks: Any) -> int:
    """Return the window's batches where ranks must make equally many steps, else 0: the clock decides."""
    if ranks.world_size == 1:
        return 0
    half = stream.waits[len(stream.waits) // 2 :]
    batch_s = (half[-1][0] - half[0][0]) / max(1, len(half) - 1)
    return max(task.min_batches, int(ranks.largest(math.ceil(task.seconds / max(batch_s, 1e-6)))))


def thin_out(waits: list[tuple[float, float]], points: int = MAX_TIMELINE_POINTS) -> list[tuple[float, float]]:
    """Return at most `points` of (time, wait), the longest wait of each stretch, rounded to microseconds."""
    stride = max(1, math.ceil(len(waits) / points))
    stretches = (waits[start : start + stride] for start in range(0, len(waits), stride))
    longest = (max(stretch, key=lambda point: point[1]) for stretch in stretches)
    return [(round(at, 6), round(wait, 6)) for at, wait in longest]


def main(arguments: list[str]) -> int:
    """Measure the task in the file ``arguments[0]`` and write the figures, or the error, to ``arguments[1]``."""
    values = json.loads(Path(arguments[0]).read_text())
    if values["rendezvous"]:
        values["rendezvous"] = tuple(values["rendezvous"])
    try:
        result: dict[str, Any] = {"figures": measure(Task(**values))}
    except FastDataError as exc:
        result = {"error": str(exc), "type": type(exc).__name__}
    Path(arguments[1]).write_text(json.dumps(result))
    return 0 if "figures" in result else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
