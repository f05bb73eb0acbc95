"""Facts about the machine and the versions, as they stand in a benchmark file."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from pathlib import Path
from typing import Any

import psutil

from fastdata.gpu import open_gpu_meter
from fastdata.monitor import cores_available

VERSIONED = (
    "fastdata",
    "torch",
    "torchvision",
    "numpy",
    "pillow",
    "numba",
    "simplejpeg",
    "webdataset",
    "nvidia-dali-cuda120",
    "nvidia-dali-cuda130",
    "nvidia-nvimgcodec-cu12",
    "nvidia-ml-py",
)
"""Packages whose versions a figure depends on."""


def describe_machine(device: str, gpus: int = 1) -> dict[str, Any]:
    """Return CPU, cores, memory and GPUs, for the ``machine`` part of a benchmark file.

    Args:
        device: "cpu" or "cuda:N"; the GPUs described are the used ones.
        gpus: How many CUDA devices the job uses, from `device` on.
    """
    first = int(device.partition(":")[2] or 0)
    cards = []
    for ordinal in range(first, first + gpus) if device.startswith("cuda") else []:
        meter = open_gpu_meter(f"cuda:{ordinal}")
        cards.append(meter.describe())
        meter.close()
    return {
        "cpu": cpu_name(),
        "cpu_cores_logical": os.cpu_count(),
        "cpu_cores_available": cores_available(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "load_average_1min": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "gpus": cards,
    }


def describe_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages of `VERSIONED` that are installed."""
    versions = {"python": sys.version.split()[0]}
    for package in VERSIONED:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def cpu_name() -> str:
    """Return the processor's model name."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
