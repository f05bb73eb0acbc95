"""`open_pipeline`: turns a user's arguments into a source, a spec and an execution, and hands them to a backend."""

from __future__ import annotations

import difflib
import inspect
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from fastdata.errors import UsageError
from fastdata.pipeline import Pipeline
from fastdata.registry import load_backend
from fastdata.spec import (
    BatchTransform,
    DType,
    Execution,
    Labels,
    MemoryFormat,
    Orientation,
    PipelineSpec,
    Shuffle,
    Skip,
)
from fastdata.transforms import Transform, sort_recipe

if TYPE_CHECKING:
    import torch

Data = str | Path | Sequence[str | Path]
"""A folder of class folders, a folder of shards, a shard list, a glob, a ``{000..099}`` range, or URLs."""

_CONFIG_KEYS = {"workers", "prefetch", "pin_memory", "options"}


def open_pipeline(
    data: Data,
    *,
    backend: str,
    transform: Sequence[Transform] | Transform,
    batch_size: int,
    device: Any = None,
    dtype: DType | torch.dtype = "float32",
    memory_format: MemoryFormat = "channels_last",
    labels: Labels = "folders",
    batch_transform: BatchTransform | None = None,
    shuffle: Shuffle = True,
    seed: int = 0,
    drop_last: bool = False,
    on_error: Literal["raise", "skip"] | Skip = "raise",
    orientation: Orientation = "apply",
    rank: int | None = None,
    world_size: int | None = None,
    workers: int | Literal["auto"] = "auto",
    prefetch: int = 2,
    pin_memory: bool | None = None,
    options: Any = None,
    config: str | Path | None = None,
    **unknown: Any,
) -> Pipeline:
    """Open images for training: the same samples, crops and pixels from every backend.

    Args:
        data: A folder of class folders, a folder of shards, a shard list, a glob, a ``{000..099}`` range, or URLs.
        backend: "pil", "torchvision", "webdataset", "dali", an installed plug-in's name, or "package.module:Class".
        transform: Transforms in order, for example `fastdata.imagenet_train(224)`. Host backends also take callables on
            a (3, H, W) uint8 tensor.
        batch_size: Samples a batch and rank.
        device: None or "cpu" for host tensors, "cuda" or "cuda:N" for tensors that are on the GPU when you get them.
        dtype: Of the images: "float32", "float16", "bfloat16", or "uint8" (0..255, `Normalize` left out); or the
            torch.dtype of that name.
        memory_format: "channels_last" or "contiguous". The shape is (n, 3, H, W) in both.
        labels: "folders" (the index of the class folder), a CSV file of path,label[,label...], a callable on the path,
            or None.
        batch_transform: ``(images, labels) -> (images, labels)`` on the device batch, with random state from
            (seed, epoch, place in the order, rank): MixUp, CutMix. torchvision v2 transforms draw once for a batch.
        shuffle: True (a full permutation by seed and epoch), False (ascending ids), `fastdata.BlockShuffle` or, for
            streams without an index, `fastdata.BufferShuffle`.
        seed: Of order and draws.
        drop_last: Leave out the last step where it is not full on every rank.
        on_error: "raise" at the first sample that cannot be decoded, "skip" and count it, or `fastdata.Skip`. A batch
            of which nothing is left is not handed out: ranks that train together should raise, or they lose step.
        orientation: "apply" turns pictures as their EXIF data say; "ignore" leaves them as stored, as ImageFolder does.
        rank: This rank; None takes it from torch.distributed, or from torchrun's variables.
        world_size: Number of ranks; None as for `rank`.
        workers: Threads or processes that load; "auto" takes the cores that this process may really use.
        prefetch: Batches made ahead.
        pin_memory: Page-locked host memory; None: when the device is a GPU.
        options: The backend's own options, for example `fastdata.HostOptions` or `fastdata.DaliOptions`.
        config: A JSON file with an object of settings for one machine; its values stand in for `workers`, `prefetch`,
            `pin_memory` and `options` where these are left at their defaults.
        **unknown: Refused; the error names the nearest argument.

    Returns:
        A `Pipeline`: re-iterable, with an exact ``len``, ``state_dict``, ``report`` and ``close``.

    Raises:
        UsageError: An argument is impossible, or this backend cannot honour it.
        SourceError: The data cannot be found or read.
        BackendUnavailableError: The backend does not work here; the message says how to get it.
    """
    _refuse_unknown(unknown)
    if config is not None:
        given = _read_config(Path(config))
        workers = given.get("workers", workers) if workers == "auto" else workers
        prefetch = given.get("prefetch", prefetch) if prefetch == 2 else prefetch
        pin_memory = given.get("pin_memory", pin_memory) if pin_memory is None else pin_memory
    backend_class = load_backend(backend)
    if config is not None and options is None and given.get("options"):
        options = _configured_options(backend_class, given["options"])
    rank, world_size = find_rank(rank, world_size)
    target = normal_device(device)
    spec = PipelineSpec(
        recipe=sort_recipe(transform),
        batch_size=batch_size,
        device=target,
        dtype=cast("DType", str(dtype).removeprefix("torch.")),
        memory_format=memory_format,
        batch_transform=batch_transform,
        shuffle=shuffle,
        seed=seed,
        drop_last=drop_last,
        skip=_skip_policy(on_error),
        orientation=orientation,
        rank=rank,
        world_size=world_size,
    )
    from fastdata.cores import usable_cores

    if workers == "auto":
        workers = usable_cores()
    on_gpu = target != "cpu"
    if pin_memory and not on_gpu:
        _refuse_pinning_without_a_gpu()
    execution = Execution(
        workers=_whole_number("workers", workers),
        prefetch=_whole_number("prefetch", prefetch),
        pin_memory=on_gpu if pin_memory is None else pin_memory,
        options=options,
    )
    source = backend_class.open_source(data, labels, options, skip_damaged=spec.skip is not None)
    try:
        return backend_class(source, spec, execution)
    except BaseException:
        source.close()
        raise


def find_rank(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return (rank, world_size) from the arguments, torch.distributed, or torchrun's variables, in this order.

    Raises:
        UsageError: Only one of the two was given.
    """
    if (rank is None) != (world_size is None):
        raise UsageError("rank", f"rank={rank}, world_size={world_size}", "both or neither")
    if rank is not None and world_size is not None:
        return rank, world_size
    distributed = sys.modules.get("torch.distributed")  # no process group can be up where it was never imported
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank()), int(distributed.get_world_size())
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return 0, 1


def normal_device(device: Any) -> str:
    """Return "cpu" or "cuda:N" for None, a string or a torch.device; "cuda" means torch's current device."""
    text = "cpu" if device is None else str(device)
    if text == "cuda":
        import torch

        return f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cuda:0"
    return text


def _refuse_unknown(unknown: dict[str, Any]) -> None:
    # What users of torch's DataLoader, timm and DALI type first.
    aliases = {"num_workers": "workers", "num_threads": "workers", "prefetch_factor": "prefetch", "split": "data"}
    for name in unknown:
        known = [n for n, p in inspect.signature(open_pipeline).parameters.items() if p.kind is not p.VAR_KEYWORD]
        near = aliases.get(name) or next(iter(difflib.get_close_matches(name, known, n=1, cutoff=0.5)), None)
        raise UsageError(
            f"argument {name!r}",
            "unknown",
            "an argument of fastdata.open_pipeline",
            f'Did you mean "{near}"?' if near else "Backend-only settings go in options=.",
        )


def _skip_policy(on_error: object) -> Skip | None:
    if isinstance(on_error, Skip):
        return on_error
    if on_error == "raise":
        return None
    if on_error == "skip":
        return Skip()
    raise UsageError("on_error", f"{on_error!r}", '"raise", "skip" or fastdata.Skip(max_fraction=...)')


def _whole_number(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(name, f"{value!r}", "an int" + (' or "auto"' if name == "workers" else ""))
    return value


def _refuse_pinning_without_a_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        found, expected = "True, but torch finds no GPU", "None or False where there is no GPU to copy to"
        raise UsageError("pin_memory", found, expected, "Page-locked memory comes from a GPU's driver.")


def _read_config(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as exc:
        raise UsageError("config", f"{path}: {exc}", "a JSON file with an object of settings") from exc
    if not isinstance(found, dict) or not set(found) <= _CONFIG_KEYS:
        raise UsageError("config", f"{path}: {found!r}", "an object with " + ", ".join(sorted(_CONFIG_KEYS)))
    return cast("dict[str, Any]", found)


def _configured_options(backend_class: type[Pipeline], values: dict[str, Any]) -> Any:
    if backend_class.options_type is None:
        raise UsageError("config", f"options {values}", f'no options: backend="{backend_class.name}" has none')
    try:
        return backend_class.options_type(**values)
    except TypeError as exc:
        raise UsageError(
            "config", f"options {values}: {exc}", f"fields of {backend_class.options_type.__name__}"
        ) from exc
