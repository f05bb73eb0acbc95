"""Loaders with a known speed, CPU use or fault, for the tests of the benchmark. Used in fresh processes too."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch

from fastdata.batch import Batch, Report, Skipped
from fastdata.errors import UsageError
from fastdata.task import Loader, Task

PICTURE_S = 0.01


def make_batch(task: Task, images: int | None = None) -> Batch:
    count = task.batch_size if images is None else images
    pictures = torch.zeros(count, 3, task.size, task.size, dtype=getattr(torch, task.dtype))
    return Batch(
        pictures.contiguous(memory_format=torch.channels_last),
        torch.zeros(count, dtype=torch.int64),
        torch.arange(count),
    )


class PacedLoader:
    """Takes 10 ms a picture, by the clock, so that a slow wake-up does not add up."""

    def __init__(self, task: Task, *, ready: int = 0, batches_per_epoch: int = 10_000) -> None:
        self.task = task
        self.ready = ready
        self.batches_per_epoch = batches_per_epoch

    def __iter__(self) -> Iterator[Batch]:
        if not self.ready:
            yield from self._paced()
            return
        made: queue.Queue[Batch] = queue.Queue(self.ready)
        for _ in range(self.ready):
            made.put(make_batch(self.task))
        threading.Thread(target=lambda: [made.put(batch) for batch in self._paced()], daemon=True).start()
        while True:
            yield made.get()

    def _paced(self) -> Iterator[Batch]:
        batch = make_batch(self.task)
        due = time.perf_counter()
        for _ in range(self.batches_per_epoch):
            due += PICTURE_S * self.task.batch_size
            time.sleep(max(0.0, due - time.perf_counter()))
            yield batch


def paced(task: Task) -> Loader:
    return Loader(PacedLoader(task), ready_batches=1, facts=_facts())


def paced_with_four_ready(task: Task) -> Loader:
    return Loader(PacedLoader(task, ready=4), ready_batches=4, facts=_facts())


def paced_short_epochs(task: Task) -> Loader:
    report = Report(skipped=[Skipped(7, "seven.jpg", "cut")])
    return Loader(PacedLoader(task, batches_per_epoch=3), ready_batches=1, report=lambda: report, facts=_facts())


def paced_one_second_epochs(task: Task) -> Loader:
    return Loader(PacedLoader(task, batches_per_epoch=12), ready_batches=1, facts=_facts())


def endless(task: Task) -> Loader:
    batch = make_batch(task)
    return Loader(iter(lambda: batch, None), ready_batches=1, facts=_facts())


def without_batches(task: Task) -> Loader:  # noqa: ARG001
    return Loader([], ready_batches=1, facts=_facts())


def of_wrong_dtype(task: Task) -> Loader:
    batch = Batch(make_batch(task).images.half(), None, torch.arange(task.batch_size))
    return Loader([batch] * 10, ready_batches=1, facts=_facts())


def that_raises(task: Task) -> Loader:
    raise UsageError("stub", f"raises for batch_size={task.batch_size}")


def that_dies(task: Task) -> Loader:  # noqa: ARG001
    import os

    os._exit(7)


def that_hangs(task: Task) -> Loader:  # noqa: ARG001
    time.sleep(3600)
    raise AssertionError


def tiny_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(3, 10))


def _facts() -> dict[str, Any]:
    return {"source": "stub", "order": "none", "samples": None, "workers": 1, "prefetch": 2}
