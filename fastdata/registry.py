"""Which backends exist, where their classes live, and whether each works here."""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
from dataclasses import dataclass
from typing import Any

from fastdata.errors import BackendUnavailableError, FastDataError, UsageError
from fastdata.pipeline import Availability, Pipeline

ENTRY_POINT_GROUP = "fastdata.backends"


@dataclass(frozen=True)
class BuiltIn:
    """A backend of this package."""

    target: str
    """``module:Class``, imported only when the backend is asked for."""
    remedy: str
    """What to do where that import fails."""


BUILT_IN = {
    "pil": BuiltIn("fastdata.backends.pil:PilPipeline", "Reinstall fastdata: Pillow is one of its requirements."),
    "torchvision": BuiltIn(
        "fastdata.backends.tvio:TorchvisionPipeline",
        "Install a torchvision that was built for your torch: pip install --upgrade torch torchvision",
    ),
    "webdataset": BuiltIn(
        "fastdata.backends.wds:WebDatasetPipeline", "Reinstall fastdata: webdataset is one of its requirements."
    ),
    "dali": BuiltIn(
        "fastdata.backends.dali:DaliPipeline",
        "pip install nvidia-dali-cuda120 (or nvidia-dali-cuda130 for CUDA 13; Linux).",
    ),
}


def backend_names() -> list[str]:
    """Return the built-in names, then those that installed packages add as entry points."""
    return [*BUILT_IN, *sorted(name for name in _entry_points() if name not in BUILT_IN)]


def load_backend(name: str) -> type[Pipeline]:
    """Return the class of a backend.

    Args:
        name: A built-in name, an entry point's name, or ``package.module:Class``. Built-in names cannot be shadowed.

    Raises:
        UsageError: No backend has this name; the message holds the nearest one.
        BackendUnavailableError: The backend exists, but its packages do not import here.
    """
    if name in BUILT_IN:
        return _import_class(name, BUILT_IN[name].target, BUILT_IN[name].remedy)
    if ":" in name:
        return _import_class(name, name, "Check the module path and the class name.")
    entry = _entry_points().get(name)
    if entry is not None:
        return _import_class(name, entry.value, f"The package {entry.dist and entry.dist.name} provides it.")
    near = difflib.get_close_matches(name, backend_names(), n=1)
    raise UsageError(
        "backend",
        f"{name!r}",
        "one of " + ", ".join(f'"{n}"' for n in backend_names()) + ', or "package.module:Class"',
        f'Did you mean "{near[0]}"?' if near else "",
    )


def check_backend(name: str) -> Availability:
    """Say whether a backend works here, and for one that does not, why and how to get it. Never raises for that."""
    try:
        backend = load_backend(name)
    except FastDataError as error:
        return Availability(name, works=False, reason=error.found, remedy=error.remedy)
    return backend.availability()


def _entry_points() -> dict[str, importlib.metadata.EntryPoint]:
    return {entry.name: entry for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)}


def _import_class(name: str, target: str, remedy: str) -> type[Pipeline]:
    module, _, attribute = target.partition(":")
    try:
        found: Any = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, OSError) as exc:  # a shared library that does not load raises OSError
        raise BackendUnavailableError(name, str(exc) or type(exc).__name__, "a backend that imports", remedy) from exc
    if not (isinstance(found, type) and issubclass(found, Pipeline)):
        raise UsageError("backend", f"{target} is {found!r}", "a subclass of fastdata.Pipeline")
    return found
