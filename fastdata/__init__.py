"""fastdata keeps GPUs fed with images: one `Pipeline` interface over four loader backends.

Importing this package loads neither torch nor any backend; names are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastdata.api import open_pipeline
    from fastdata.batch import Batch, Report, Skipped
    from fastdata.errors import FastDataError
    from fastdata.pipeline import Pipeline
    from fastdata.spec import (
        BlockShuffle,
        BufferShuffle,
        DaliOptions,
        HostOptions,
        Skip,
        TorchvisionOptions,
        WebDatasetOptions,
    )
    from fastdata.transforms import (
        CenterCrop,
        ColorJitter,
        Normalize,
        RandomErasing,
        RandomGrayscale,
        RandomHorizontalFlip,
        RandomResizedCrop,
        Resize,
        imagenet_eval,
        imagenet_train,
    )

__version__ = "0.1.0"

_HOMES = {
    "Batch": "batch",
    "BlockShuffle": "spec",
    "BufferShuffle": "spec",
    "CenterCrop": "transforms",
    "ColorJitter": "transforms",
    "DaliOptions": "spec",
    "FastDataError": "errors",
    "HostOptions": "spec",
    "Normalize": "transforms",
    "Pipeline": "pipeline",
    "RandomErasing": "transforms",
    "RandomGrayscale": "transforms",
    "RandomHorizontalFlip": "transforms",
    "RandomResizedCrop": "transforms",
    "Report": "batch",
    "Resize": "transforms",
    "Skip": "spec",
    "Skipped": "batch",
    "TorchvisionOptions": "spec",
    "WebDatasetOptions": "spec",
    "imagenet_eval": "transforms",
    "imagenet_train": "transforms",
    "open_pipeline": "api",
}

__all__ = [
    "Batch",
    "BlockShuffle",
    "BufferShuffle",
    "CenterCrop",
    "ColorJitter",
    "DaliOptions",
    "FastDataError",
    "HostOptions",
    "Normalize",
    "Pipeline",
    "RandomErasing",
    "RandomGrayscale",
    "RandomHorizontalFlip",
    "RandomResizedCrop",
    "Report",
    "Resize",
    "Skip",
    "Skipped",
    "TorchvisionOptions",
    "WebDatasetOptions",
    "imagenet_eval",
    "imagenet_train",
    "open_pipeline",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fastdata' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"fastdata.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
