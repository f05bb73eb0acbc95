"""The loaders that people use today, each as its own documentation recommends, to stand in the same table.

Every function here is a loader factory for `fastdata.task.Task.loader`. They deliver what the pipelines deliver:
normalised images (uint8 without normalisation), channels_last, on the task's device; their random draws are their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastdata.benchmark import Progress, merge_ranks
from fastdata.cores import usable_cores
from fastdata.fresh import MeasureError
from fastdata.job import Job
from fastdata.sources.open import is_shards, is_stream
from fastdata.sources.shardlist import list_shards
from fastdata.task import Loader, Task
from fastdata.transforms import IMAGENET_MEAN, IMAGENET_STD

if TYPE_CHECKING:
    import torch

HW_DECODER_LOADS = (0.65, 0.8, 0.95)
"""Shares of the pictures that DALI gives to the JPEG engine: its default, and what is tried besides."""


@dataclass(frozen=True)
class Baseline:
    """One such loader."""

    name: str
    """Of its row."""
    factory: str
    """``module:factory``."""
    source: str
    """"folder" or "shards": what it reads."""
    needs: str
    """The module that must be importable."""


BASELINES = (
    Baseline("plain ImageFolder", "fastdata.baselines:image_folder", "folder", "torchvision"),
    Baseline("plain webdataset", "fastdata.baselines:plain_webdataset", "shards", "webdataset"),
    Baseline("plain DALI", "fastdata.baselines:plain_dali", "folder", "nvidia.dali"),
    Baseline("plain DALI", "fastdata.baselines:plain_dali", "shards", "nvidia.dali"),
)


def image_folder(task: Task) -> Loader:
    """``torchvision.datasets.ImageFolder`` and torch's DataLoader, as in PyTorch's ImageNet example."""
    import torch
    from torch.utils.data import DataLoader, DistributedSampler
    from torchvision.datasets import ImageFolder

    dataset = ImageFolder(task.data, _picture_transform(task))
    workers = _workers(task)
    sampler: Any = None
    if task.world_size > 1:
        sampler = DistributedSampler(dataset, num_replicas=task.world_size, rank=task.rank)
    loader = DataLoader(
        dataset,
        batch_size=task.batch_size,
        shuffle=sampler is None,
        sampler=sampler,
        num_workers=workers,
        pin_memory=task.device != "cpu",
        drop_last=task.drops_last,
        persistent_workers=workers > 0,
        prefetch_factor=task.prefetch if workers else None,
    )
    return Loader(
        _OnDevice(loader, torch.device(task.device), getattr(torch, task.dtype)),
        ready_batches=task.prefetch * workers + 1,
        facts=_facts("folder", "full permutation", len(dataset), workers, task.prefetch, classes=len(dataset.classes)),
    )


def plain_webdataset(task: Task) -> Loader:
    """The pipeline of the webdataset README: shuffled shards, a sample buffer, PIL decode, ``WebLoader``."""
    import torch
    import webdataset

    shards = task.data if is_stream(task.data) else list_shards(task.data)[0]
    workers = _workers(task)
    if isinstance(shards, list):  # a worker without a shard would only be started and stopped
        workers = min(workers, max(1, len(shards) // task.world_size))
    dataset = (
        webdataset.WebDataset(
            shards,
            shardshuffle=100,
            nodesplitter=webdataset.split_by_node,
            workersplitter=webdataset.split_by_worker,
            empty_check=False,
        )
        .shuffle(1000)
        .decode("pil")
        .to_tuple("jpg;jpeg;png;webp", "cls")
        .map_tuple(_picture_transform(task), _identity)
        .batched(task.batch_size, partial=not task.drops_last)
    )
    loader = webdataset.WebLoader(
        dataset,
        batch_size=None,
        shuffle=False,
        num_workers=workers,
        pin_memory=task.device != "cpu",
        persistent_workers=workers > 0,
        prefetch_factor=task.prefetch if workers else None,
    )
    return Loader(
        _OnDevice(loader, torch.device(task.device), getattr(torch, task.dtype)),
        ready_batches=task.prefetch * max(1, workers) + 1,
        facts=_facts("shards", "shuffled shards, buffer of 1000", None, workers, task.prefetch),
    )


def plain_dali(task: Task) -> Loader:
    """DALI's ResNet-50 example: file or tar reader, ``image_random_crop`` on the mixed device, one fused normalise."""
    import torch
    from nvidia.dali.plugin.pytorch import DALIGenericIterator, LastBatchPolicy

    settings = {"threads": _workers(task), "hw_decoder_load": HW_DECODER_LOADS[0], "queue": 2, **task.options}
    pipeline = _dali_pipeline(task, settings)
    pipeline.build()
    iterator = DALIGenericIterator(
        [pipeline],
        ["images", "labels"],
        reader_name="reader",
        last_batch_policy=LastBatchPolicy.PARTIAL,
        auto_reset=True,
    )
    source = _source(task.data)
    order = "shuffled once, then a buffer" if source == "folder" else "a buffer of 1024"
    return Loader(
        _DaliBatches(iterator, torch.device(task.device), getattr(torch, task.dtype)),
        ready_batches=settings["queue"] + 1,
        close=iterator.reset,
        facts=_facts(source, order, pipeline.epoch_size("reader"), settings["threads"], task.prefetch)
        | {"options": settings},
    )


def dali_settings(task: Task) -> list[dict[str, Any]]:
    """Return the settings of `plain_dali` to try: threads, and on a GPU the JPEG engine's share."""
    cores = usable_cores()
    threads = sorted({max(1, cores // 4), max(1, cores // 2), cores})
    if task.device == "cpu":
        return [{"threads": count} for count in threads]
    return [{"threads": count, "hw_decoder_load": load, "queue": 3} for count in threads for load in HW_DECODER_LOADS]


def baseline_tasks(template: Task) -> tuple[list[Task], list[dict[str, str]]]:
    """Return a task for each baseline that can read the template's data, and the others with the reason.

    Args:
        template: Any task on the same data.
    """
    import importlib.util

    source = _source(template.data)
    tasks, left_out = [], []
    for baseline in BASELINES:
        if baseline.source != source:
            continue
        top = baseline.needs.partition(".")[0]
        if importlib.util.find_spec(top) is None or importlib.util.find_spec(baseline.needs) is None:
            left_out.append({"backend": baseline.name, "reason": f"{baseline.needs} is not installed"})
            continue
        tasks.append(
            dataclasses.replace(template, backend=baseline.name, loader=baseline.factory, options={}, block_shards=0)
        )
    return tasks, left_out


def with_best_settings(
    tasks: Sequence[Task], job: Job, progress: Progress
) -> tuple[list[Task], dict[str, list[dict[str, Any]]]]:
    """Give the tasks of "plain DALI" the best settings of a short sweep on the same data; others stay as they are.

    Args:
        tasks: Any tasks. A training row takes what is best for loading alone.
        job: The ranks that measure together.
        progress: Told of every measurement.

    Returns:
        The tasks, and what each sweep measured, by data.
    """
    sweeps: dict[str, list[dict[str, Any]]] = {}
    chosen = []
    for task in tasks:
        if task.loader == "fastdata.baselines:plain_dali":
            if task.data not in sweeps:
                sweeps[task.data] = _sweep(task, job, progress)
            if sweeps[task.data]:  # otherwise all settings failed, and the row will tell why
                best = max(sweeps[task.data], key=lambda trial: float(trial["images_per_s"]))
                task = dataclasses.replace(task, options={k: v for k, v in best.items() if k != "images_per_s"})
        chosen.append(task)
    return chosen, sweeps


def _sweep(task: Task, job: Job, progress: Progress) -> list[dict[str, Any]]:
    sweep: list[dict[str, Any]] = []
    candidates = dali_settings(task)
    for number, settings in enumerate(candidates):
        trial = dataclasses.replace(
            task, mode="loader", options=settings, cache="warm", seconds=min(task.seconds, 2.0), warmup_s=1.0
        )
        try:
            rate = merge_ranks(job.measure(trial, f"sweep/{task.data}/{number}"))["images_per_s"]
        except MeasureError as exc:
            progress(number + 1, len(candidates), trial, f"settings {settings} failed: {exc.found}")
            continue
        sweep.append({**settings, "images_per_s": rate})
        progress(number + 1, len(candidates), trial, f"settings {settings}: {rate:,.0f} img/s")
    return sweep


def _dali_pipeline(task: Task, settings: dict[str, Any]) -> Any:
    from nvidia.dali import fn, pipeline_def, types

    on_gpu = task.device.startswith("cuda")
    decoder_settings = {"hw_decoder_load": settings["hw_decoder_load"]} if on_gpu else {}
    floating = task.dtype != "uint8"

    @pipeline_def(  # type: ignore[untyped-decorator,unused-ignore]
        batch_size=task.batch_size,
        num_threads=settings["threads"],
        device_id=int(task.device.partition(":")[2] or 0) if on_gpu else None,
        prefetch_queue_depth=settings["queue"],
        exec_dynamic=True,  # the executor that its documentation recommends, and the default of DALI 2
        seed=0,
    )
    def graph() -> Any:
        reader = {
            "name": "reader",
            "random_shuffle": True,
            "shard_id": task.rank,
            "num_shards": task.world_size,
            "pad_last_batch": True,
        }
        if _source(task.data) == "folder":
            encoded, labels = fn.readers.file(file_root=task.data, **reader)
        else:
            encoded, digits = fn.readers.webdataset(
                paths=list_shards(task.data)[0],
                ext=["jpg;jpeg;png", "cls"],
                missing_component_behavior="error",
                **reader,
            )
            labels = fn.pad(digits, shape=(8,))  # ASCII digits, which DALI cannot parse: `_DaliBatches` does
        pictures = fn.decoders.image_random_crop(
            encoded,
            device="mixed" if on_gpu else "cpu",
            output_type=types.RGB,
            random_aspect_ratio=[3 / 4, 4 / 3],
            random_area=[0.08, 1.0],
            num_attempts=100,
            **decoder_settings,
        )
        pictures = fn.resize(pictures, size=[task.size, task.size], interp_type=types.INTERP_LINEAR, antialias=True)
        images = fn.crop_mirror_normalize(
            pictures,
            dtype=types.FLOAT if floating else types.UINT8,
            output_layout="HWC",
            mean=[255 * value for value in IMAGENET_MEAN] if floating else [0.0],
            std=[255 * value for value in IMAGENET_STD] if floating else [1.0],
            mirror=fn.random.coin_flip(probability=0.5),
        )
        return images, labels.gpu() if on_gpu else labels

    return graph()


class _OnDevice:
    """Moves the batches of a DataLoader as PyTorch's example does: non-blocking, on the default stream."""

    def __init__(self, loader: Iterable[Any], device: torch.device, dtype: torch.dtype) -> None:
        self._loader = loader
        self._device = device
        self._dtype = dtype

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        import torch

        for images, labels in self._loader:
            moved = images.to(self._device, non_blocking=True)
            moved = moved.to(dtype=self._dtype, memory_format=torch.channels_last)
            yield moved, torch.as_tensor(labels).to(self._device, non_blocking=True)


class _DaliBatches:
    """Unpacks what DALI's iterator returns."""

    def __init__(self, iterator: Any, device: torch.device, dtype: torch.dtype) -> None:
        self._iterator = iterator
        self._device = device
        self._dtype = dtype

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        for outputs in self._iterator:
            images, labels = outputs[0]["images"], outputs[0]["labels"]
            if labels.shape[-1] == 8 and labels.ndim == 2:
                labels = _from_digits(labels)
            images = images.permute(0, 3, 1, 2).to(dtype=self._dtype)  # HWC memory is channels_last
            yield images, labels.reshape(-1).to(self._device, dtype=labels.dtype).long()


def _from_digits(digits: torch.Tensor) -> torch.Tensor:
    """Return the numbers of (n, 8) zero-padded ASCII digits as (n,) int64."""
    import torch

    values = torch.zeros(len(digits), dtype=torch.int64, device=digits.device)
    for column in digits.long().unbind(1):
        is_digit = (column >= ord("0")) & (column <= ord("9"))
        values = torch.where(is_digit, values * 10 + column - ord("0"), values)
    return values


def _picture_transform(task: Task) -> Any:
    from torchvision import transforms

    steps: list[Any] = [transforms.RandomResizedCrop(task.size), transforms.RandomHorizontalFlip()]
    if task.dtype == "uint8":
        return transforms.Compose([_to_rgb, *steps, transforms.PILToTensor()])
    return transforms.Compose(
        [_to_rgb, *steps, transforms.ToTensor(), transforms.Normalize(IMAGENET_MEAN, IMAGENET_STD)]
    )


def _to_rgb(picture: Any) -> Any:
    return picture.convert("RGB")


def _identity(value: Any) -> Any:
    return value


def _workers(task: Task) -> int:
    return usable_cores() if task.workers == "auto" else task.workers


def _source(data: str) -> str:
    return "shards" if is_stream(data) or is_shards(data) else "folder"


def _facts(source: str, order: str, samples: int | None, workers: int, prefetch: int, **more: Any) -> dict[str, Any]:
    return {"source": source, "order": order, "samples": samples, "workers": workers, "prefetch": prefetch, **more}
