"""Why DALI does or does not work on this machine, found out without starting it.

Each finding comes with what to do about it. DALI's own message in most of these cases is about a missing library.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_CUDA_NO_DEVICE = 100
_CUDA_MESSAGES = {
    _CUDA_NO_DEVICE: "the driver sees no GPU",
    101: "the driver refuses the GPU's number",
    802: "the GPU's system services are not ready (NVSwitch fabric manager)",
    803: "the loaded driver and its library are of different versions",
    804: "the driver is too old for the CUDA compatibility package",
    999: "the driver reports an unknown error",
}
_OLDEST_DRIVER = {11: 11000, 12: 12000, 13: 13000}
"""CUDA version that a driver must offer at least, by the CUDA major version that DALI was built for. Within a major
version older drivers work (CUDA minor version compatibility)."""


@dataclass(frozen=True)
class Fault:
    """One thing that is missing."""

    reason: str
    """What was found."""
    remedy: str
    """What to do."""


@dataclass(frozen=True)
class Probes:
    """How the machine is asked; tests put other answers in."""

    package: Callable[[], str | None]
    """Version of the installed DALI package and the CUDA it was built for ("2.4.0 cuda120"), or None."""
    importing: Callable[[], str | None]
    """Why DALI does not import, or None."""
    device_files: Callable[[], dict[str, bool]]
    """NVIDIA device files: path to whether this user may read and write it."""
    driver: Callable[[], tuple[int, int] | None]
    """(result of cuInit, CUDA version that the driver offers), or None where no driver library is there."""
    engine: Callable[[int], bool | None]
    """Whether a GPU has a JPEG engine; None where it cannot be found out."""


def describe_dali(probes: Probes | None = None) -> tuple[bool, str, str]:
    """Return whether DALI works here, what it does or why not, and what to do.

    Returns:
        (works, reason, remedy). It works without a GPU too, on the CPU; the reason then says what keeps the GPU away.
    """
    ask = probes or REAL
    version = ask.package()
    if version is None:
        return False, "NVIDIA DALI is not installed", _install_advice()
    broken = ask.importing()
    if broken is not None:
        return False, f"NVIDIA DALI {version} does not import: {broken}", "Reinstall it: " + _install_advice()
    fault = gpu_fault(ask)
    if fault is not None:
        return True, f"DALI {version}, decodes on the CPU only: {fault.reason}", fault.remedy
    engine = ask.engine(0)
    if engine is False:
        return (
            True,
            f"DALI {version} on the GPU, which has no JPEG engine: CUDA kernels and CPU threads decode",
            "Give it more threads: DaliOptions(decode_threads=8). GPUs with engines: A100, A30, H100, H200 and later.",
        )
    with_engine = "with its JPEG engines" if engine else "(whether it has JPEG engines cannot be read here)"
    return True, f"DALI {version} on the GPU {with_engine}", ""


def gpu_fault(probes: Probes | None = None) -> Fault | None:
    """Return what keeps DALI from every GPU, or None. Whether there is one of a certain number, torch knows."""
    ask = probes or REAL
    files = ask.device_files()
    driver = ask.driver()
    denied = sorted(path for path, allowed in files.items() if not allowed)
    if denied and (driver is None or driver[0] != 0):  # where the driver starts, those are other people's GPUs
        return Fault(
            f"no permission to use {', '.join(denied)}",
            "Ask for read and write access (`ls -l /dev/nvidia*`), or start the container with its GPUs (--gpus all).",
        )
    if driver is None:
        if files:
            return Fault(
                "the GPU's device files are there, but no driver library (libcuda.so.1)",
                "Start the container with the NVIDIA runtime (--gpus all), or install the driver's libraries.",
            )
        return Fault("no NVIDIA driver and no GPU", 'Use device="cpu", or a machine with an NVIDIA GPU.')
    result, offered = driver
    if result != 0:
        found = _CUDA_MESSAGES.get(result, "the driver does not start")
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        if result == _CUDA_NO_DEVICE and hidden is not None:
            return Fault(f"CUDA_VISIBLE_DEVICES={hidden!r} hides all GPUs", "Unset it, or name a GPU.")
        return Fault(f"{found} (CUDA error {result})", "Check `nvidia-smi`; reload the driver or restart the machine.")
    built_for = _built_for_cuda(ask.package() or "")
    needed = _OLDEST_DRIVER.get(built_for, 0)
    if offered < needed:
        return Fault(
            f"the driver offers CUDA {offered // 1000}.{offered % 1000 // 10}, DALI needs {built_for}.0",
            "Update the driver (525 or newer for CUDA 12, 580 for CUDA 13), or install a DALI for the older CUDA.",
        )
    return None


def _install_advice() -> str:
    if platform.system() != "Linux":
        return f"DALI exists for Linux only, and this is {platform.system()}: use another backend."
    return "pip install nvidia-dali-cuda120 (or nvidia-dali-cuda130 for CUDA 13)."


def _package() -> str | None:
    if importlib.util.find_spec("nvidia") is None or importlib.util.find_spec("nvidia.dali") is None:
        return None
    for name in ("nvidia-dali-cuda130", "nvidia-dali-cuda120", "nvidia-dali-cuda110"):
        try:
            return f"{importlib.metadata.version(name)} {name.removeprefix('nvidia-dali-')}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return "of unknown version"


def _importing() -> str | None:
    try:
        importlib.import_module("nvidia.dali")
    except (ImportError, OSError, RuntimeError) as exc:  # a shared library that does not load raises any of these
        return f"{type(exc).__name__}: {exc}"
    return None


def _device_files() -> dict[str, bool]:
    names = [Path("/dev/nvidiactl"), Path("/dev/nvidia-uvm"), *Path("/dev").glob("nvidia[0-9]*")]
    return {str(path): os.access(path, os.R_OK | os.W_OK) for path in names if path.exists()}


def _driver() -> tuple[int, int] | None:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int(0)
    library.cuDriverGetVersion(ctypes.byref(version))
    return int(library.cuInit(0)), version.value


def _engine(index: int) -> bool | None:
    try:
        import pynvml
    except ImportError:
        return None
    nvml: Any = pynvml
    try:
        nvml.nvmlInit()
        nvml.nvmlDeviceGetJpgUtilization(nvml.nvmlDeviceGetHandleByIndex(index))
    except nvml.NVMLError_NotSupported:
        return False
    except (nvml.NVMLError, AttributeError):
        return None
    return True


def _built_for_cuda(version: str) -> int:
    """Return the CUDA major version in a text such as "2.4.0 cuda120"; 0 where there is none."""
    _, _, digits = version.partition("cuda")
    return int(digits[:2]) if digits[:2].isdigit() else 0


REAL = Probes(_package, _importing, _device_files, _driver, _engine)
"""The machine itself."""
