"""The meters of one GPU through NVML: utilisation, SM activity, JPEG engine, memory, power.

NVML counts the physical cards of a machine, CUDA the visible ones in its own order, so the card is found by its UUID,
or through ``CUDA_VISIBLE_DEVICES``. What cannot be read is None with the reason, never 0.
"""

from __future__ import annotations

import importlib
import math
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fastdata.reading import Reading

SETTLE_S = 0.25
"""Samples this early in a window are left out where later ones exist: NVML averages over the past 1/6 s or more."""
GPM_CHAIN_S = 1.0
"""Seconds between two reads of the performance counters; NVML asks for at least 0.1 s."""

GPU_FIELDS = (
    "gpu_util_percent",
    "gpu_sm_active_percent",
    "jpeg_engine_percent",
    "gpu_memory_mb",
    "gpu_power_w",
)
"""Names of the readings that a meter returns."""


@dataclass(frozen=True)
class Card:
    """The card, or the MIG instance of a card, that a CUDA device stands for."""

    handle: Any
    """NVML's handle of the card or of the MIG device."""
    physical: Any
    """NVML's handle of the whole card."""
    gpu_instance: int | None = None
    """NVML's number of the MIG GPU instance, or None for a whole card."""


@dataclass
class _Gauge:
    """One sampled value; the first failure ends its sampling and stays as its reason."""

    read: Callable[[], float]
    samples: list[tuple[float, float]] = field(default_factory=list)
    reason: str = ""


class UnreadableGpu:
    """Stands in where there is no card to read: every reading is None with one reason."""

    def __init__(self, reason: str) -> None:
        """Keep the reason."""
        self.reason = reason

    def open_window(self) -> None:
        """Do nothing."""

    def sample(self) -> None:
        """Do nothing."""

    def close_window(self) -> dict[str, Reading]:
        """Return every field as None with the reason."""
        return {name: Reading(None, self.reason) for name in GPU_FIELDS}

    def close(self) -> None:
        """Do nothing."""

    def describe(self) -> dict[str, Any]:
        """Return why there is nothing to describe."""
        return {"name": None, "reason": self.reason}


class GpuMeter:
    """Reads one card. `sample` is called from the monitor's thread, the rest from the measuring one."""

    def __init__(self, nvml: Any, card: Card) -> None:
        """Take an initialised NVML module and the card."""
        self._nvml = nvml
        self._card = card
        self._gauges = {
            "gpu_util_percent": _Gauge(lambda: float(nvml.nvmlDeviceGetUtilizationRates(card.handle).gpu)),
            "jpeg_engine_percent": _Gauge(lambda: float(nvml.nvmlDeviceGetJpgUtilization(card.physical)[0])),
            "gpu_memory_mb": _Gauge(lambda: nvml.nvmlDeviceGetMemoryInfo(card.handle).used / 1e6),
            "gpu_power_w": _Gauge(lambda: nvml.nvmlDeviceGetPowerUsage(card.physical) / 1e3),
        }
        self._counters = _PerformanceCounters(nvml, card)
        self._lock = threading.Lock()
        self._opened_at = 0.0
        self._closed = False

    def open_window(self) -> None:
        """Forget earlier samples and read the performance counters."""
        with self._lock:
            for gauge in self._gauges.values():
                gauge.samples = []
            self._opened_at = time.perf_counter()
            self._counters.open()

    def sample(self) -> None:
        """Sample every gauge that could be read so far."""
        with self._lock:
            now = time.perf_counter()
            for gauge in self._gauges.values():
                if not gauge.reason:
                    try:
                        gauge.samples.append((now, gauge.read()))
                    except (self._nvml.NVMLError, AttributeError) as exc:
                        gauge.reason = _why(exc)
            self._counters.advance(now)

    def close_window(self) -> dict[str, Reading]:
        """Return the window's means (of memory: its peak)."""
        self.sample()
        readings = {}
        for name, gauge in self._gauges.items():
            values = [v for at, v in gauge.samples if at >= self._opened_at + SETTLE_S] or [v for _, v in gauge.samples]
            if gauge.reason:
                readings[name] = Reading(None, gauge.reason)
            elif not values:
                readings[name] = Reading(None, "not sampled")
            else:
                readings[name] = Reading(max(values) if name == "gpu_memory_mb" else statistics.fmean(values))
        with self._lock:
            readings["gpu_sm_active_percent"] = self._counters.close()
        return readings

    def close(self) -> None:
        """Free NVML's samples and shut NVML down. Idempotent."""
        if not self._closed:
            self._closed = True
            self._counters.free()
            self._nvml.nvmlShutdown()

    def describe(self) -> dict[str, Any]:
        """Return name, memory and driver of the card, for the report."""
        nvml, card = self._nvml, self._card
        found: dict[str, Any] = {"mig": card.gpu_instance is not None}
        reads: dict[str, Callable[[], Any]] = {
            "name": lambda: nvml.nvmlDeviceGetName(card.physical),
            "memory_mb": lambda: round(nvml.nvmlDeviceGetMemoryInfo(card.handle).total / 1e6),
            "driver": nvml.nvmlSystemGetDriverVersion,
            "power_limit_w": lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(card.physical) / 1e3,
        }
        for key, read in reads.items():
            try:
                value = read()
                found[key] = _text(value) if isinstance(value, bytes) else value
            except (nvml.NVMLError, AttributeError):
                found[key] = None
        return found


def open_gpu_meter(
    device: str, *, nvml: Any = None, environment: dict[str, str] | None = None
) -> GpuMeter | UnreadableGpu:
    """Return the meters of the card behind a CUDA device, or a stand-in that says why there are none.

    Args:
        device: "cpu" or "cuda:N".
        nvml: An NVML module, for tests; None imports ``pynvml``.
        environment: The variables to look in for ``CUDA_VISIBLE_DEVICES``; None is this process's.
    """
    if not device.startswith("cuda"):
        return UnreadableGpu(f"the run uses no GPU (device {device})")
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")  # no requirement of a machine without a GPU
        except ImportError as exc:
            return UnreadableGpu(f"NVML cannot be imported: {exc}; pip install nvidia-ml-py")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as exc:
        return UnreadableGpu(f"NVML does not start: {_why(exc)}")
    ordinal = int(device.partition(":")[2] or 0)
    try:
        return GpuMeter(nvml, find_card(nvml, ordinal, dict(os.environ) if environment is None else environment))
    except (nvml.NVMLError, LookupError) as exc:
        nvml.nvmlShutdown()
        return UnreadableGpu(f"NVML does not find the card of {device}: {_why(exc)}")


def find_card(nvml: Any, ordinal: int, environment: dict[str, str], uuid: str | None = None) -> Card:
    """Return the card or MIG instance that CUDA calls ``cuda:{ordinal}``.

    Args:
        nvml: An initialised NVML module.
        ordinal: CUDA's number of the device.
        environment: Holds ``CUDA_VISIBLE_DEVICES``, or not.
        uuid: The device's UUID without prefix, where CUDA told it; None asks torch if it has started CUDA.

    Raises:
        LookupError: ``CUDA_VISIBLE_DEVICES`` names fewer devices, or one that NVML does not know.
    """
    uuid = _uuid_from_torch(ordinal) if uuid is None else uuid
    if uuid:
        for prefix in ("GPU-", "MIG-"):
            try:
                return _card(nvml, nvml.nvmlDeviceGetHandleByUUID(prefix + uuid))
            except nvml.NVMLError:
                continue
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return _card(nvml, nvml.nvmlDeviceGetHandleByIndex(ordinal))
    names = [name.strip() for name in visible.split(",")]
    if ordinal >= len(names) or not names[ordinal]:
        raise LookupError(f"CUDA_VISIBLE_DEVICES={visible!r} has no device number {ordinal}")
    name = names[ordinal]
    if name.isdigit():
        return _card(nvml, nvml.nvmlDeviceGetHandleByIndex(int(name)))
    if name.startswith("MIG-"):
        return _card(nvml, nvml.nvmlDeviceGetHandleByUUID(name))
    for index in range(nvml.nvmlDeviceGetCount()):  # CUDA accepts a UUID's unambiguous beginning, NVML does not
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        if _text(nvml.nvmlDeviceGetUUID(handle)).startswith(name):
            return _card(nvml, handle)
    raise LookupError(f"no card has the UUID {name} of CUDA_VISIBLE_DEVICES")


def _card(nvml: Any, handle: Any) -> Card:
    if nvml.nvmlDeviceIsMigDeviceHandle(handle):
        physical = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
        return Card(handle, physical, int(nvml.nvmlDeviceGetGpuInstanceId(handle)))
    try:
        split = nvml.nvmlDeviceGetMigMode(handle)[0] == 1
    except nvml.NVMLError:
        split = False  # the card does not know MIG
    if split:  # CUDA then uses the card's first instance
        return _card(nvml, nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, 0))
    return Card(handle, handle)


class _PerformanceCounters:
    """SM activity from NVML's GPM counters (Hopper and newer), a mean weighted by time over chained reads."""

    def __init__(self, nvml: Any, card: Card) -> None:
        self._nvml = nvml
        self._card = card
        self._reason = ""
        self._before: Any = None
        self._after: Any = None
        self._before_at = 0.0
        self._parts: list[tuple[float, float]] = []
        try:
            if not nvml.nvmlGpmQueryDeviceSupport(card.physical).isSupportedDevice:
                self._reason = "this GPU has no GPM counters (Hopper and newer have)"
                return
            self._before, self._after = nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()
        except (nvml.NVMLError, AttributeError) as exc:
            self._reason = f"GPM counters: {_why(exc)}"

    def open(self) -> None:
        self._parts = []
        if not self._reason:
            try:
                self._take(self._before)
                self._before_at = time.perf_counter()
            except (self._nvml.NVMLError, AttributeError) as exc:
                self._reason = f"GPM counters: {_why(exc)}"

    def advance(self, now: float, chain_s: float = GPM_CHAIN_S) -> None:
        if self._reason or not self._before_at or now - self._before_at < chain_s:
            return
        nvml = self._nvml
        try:
            self._take(self._after)
            taken_at = time.perf_counter()
            request = nvml.c_nvmlGpmMetricsGet_t()
            request.version = nvml.NVML_GPM_METRICS_GET_VERSION
            request.numMetrics = 1
            request.sample1, request.sample2 = self._before, self._after
            request.metrics[0].metricId = nvml.NVML_GPM_METRIC_SM_UTIL
            metric = nvml.nvmlGpmMetricsGet(request).metrics[0]
        except (nvml.NVMLError, AttributeError) as exc:
            self._reason = f"GPM counters: {_why(exc)}"
            return
        if metric.nvmlReturn or math.isnan(metric.value):
            self._reason = f"GPM counters: SM_UTIL gives {metric.value}, NVML error {metric.nvmlReturn}"
            return
        self._parts.append((taken_at - self._before_at, float(metric.value)))
        self._before, self._after, self._before_at = self._after, self._before, taken_at

    def close(self) -> Reading:
        self.advance(time.perf_counter(), chain_s=0.1)
        if self._reason:
            return Reading(None, self._reason)
        seconds = sum(part_s for part_s, _ in self._parts)
        if not seconds:
            return Reading(None, "GPM counters: the window is shorter than 0.1 s")
        return Reading(sum(part_s * value for part_s, value in self._parts) / seconds)

    def free(self) -> None:
        for sample in (self._before, self._after):
            if sample is not None:
                self._nvml.nvmlGpmSampleFree(sample)
        self._before = self._after = None
        self._before_at = 0.0

    def _take(self, sample: Any) -> None:
        if self._card.gpu_instance is None:
            self._nvml.nvmlGpmSampleGet(self._card.physical, sample)
        else:
            self._nvml.nvmlGpmMigSampleGet(self._card.physical, self._card.gpu_instance, sample)


def _uuid_from_torch(ordinal: int) -> str:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return ""
    return str(getattr(torch.cuda.get_device_properties(ordinal), "uuid", ""))


def _why(exc: BaseException) -> str:
    return str(exc) or type(exc).__name__


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
