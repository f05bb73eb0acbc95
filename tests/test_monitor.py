"""The meters: CPU of the process tree, memory, page cache, and what NVML says or cannot say."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import fastdata.pagecache as pagecache
from fastdata.gpu import GPU_FIELDS, GpuMeter, UnreadableGpu, find_card, open_gpu_meter
from fastdata.monitor import Monitor, cores_available, read_tree_pss_mb, read_tree_usage
from fastdata.pagecache import CacheKeeper, data_files, drop, read_all, resident_percent
from fastdata.reading import Reading

_SPINNER = """
import sys, time
while True:
    until = time.perf_counter() + 0.02
    while {busy} and time.perf_counter() < until: pass
    if not {busy}: time.sleep(0.02)
    open(sys.argv[1], "w").write(str(time.process_time()))
"""


class NvmlError(Exception):
    pass


class StubNvml:
    """An NVML with one Hopper card, of which single calls can be made to fail."""

    NVMLError = NvmlError
    NVML_GPM_METRICS_GET_VERSION = 1
    NVML_GPM_METRIC_SM_UTIL = 2

    def __init__(self, *, failing: tuple[str, ...] = (), mig: bool = False) -> None:
        self.failing = failing
        self.mig = mig
        self.cards = {"card0": "GPU-aaaa-0000", "card1": "GPU-bbbb-1111"}
        self.shut_down = 0
        self.gpm_samples = 0

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvml") and name in object.__getattribute__(self, "failing"):

            def fail(*_: Any) -> Any:
                raise NvmlError("Not Supported")

            return fail
        return object.__getattribute__(self, name)

    def nvmlInit(self) -> None:
        pass

    def nvmlShutdown(self) -> None:
        self.shut_down += 1

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        if index > 1:
            raise NvmlError("Invalid Argument")
        return f"card{index}"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid == "MIG-cccc-2222":
            return "mig"
        for handle, known in self.cards.items():
            if known == uuid:
                return handle
        raise NvmlError("Not Found")

    def nvmlDeviceGetUUID(self, handle: str) -> bytes:
        return self.cards[handle].encode()

    def nvmlDeviceIsMigDeviceHandle(self, handle: str) -> bool:
        return handle == "mig"

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: str) -> str:  # noqa: ARG002
        return "card1"

    def nvmlDeviceGetGpuInstanceId(self, handle: str) -> int:  # noqa: ARG002
        return 5

    def nvmlDeviceGetMigMode(self, handle: str) -> list[int]:  # noqa: ARG002
        return [int(self.mig), int(self.mig)]

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: str, index: int) -> str:  # noqa: ARG002
        return "mig"

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> SimpleNamespace:
        if handle == "mig":
            raise NvmlError("Not Supported")
        return SimpleNamespace(gpu=70, memory=10)

    def nvmlDeviceGetJpgUtilization(self, handle: str) -> list[int]:  # noqa: ARG002
        return [40, 1000]

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:  # noqa: ARG002
        return SimpleNamespace(used=2_000_000_000, total=8_000_000_000)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:  # noqa: ARG002
        return 350_000

    def nvmlGpmQueryDeviceSupport(self, handle: str) -> SimpleNamespace:  # noqa: ARG002
        return SimpleNamespace(isSupportedDevice=1)

    def nvmlGpmSampleAlloc(self) -> dict[str, Any]:
        self.gpm_samples += 1
        return {}

    def nvmlGpmSampleFree(self, sample: Any) -> None:  # noqa: ARG002
        self.gpm_samples -= 1

    def nvmlGpmSampleGet(self, handle: str, sample: dict[str, Any]) -> None:
        sample["of"] = handle

    def nvmlGpmMigSampleGet(self, handle: str, instance: int, sample: dict[str, Any]) -> None:
        sample["of"] = (handle, instance)

    def c_nvmlGpmMetricsGet_t(self) -> SimpleNamespace:
        return SimpleNamespace(metrics=[SimpleNamespace(metricId=0, nvmlReturn=0, value=float("nan"))])

    def nvmlGpmMetricsGet(self, request: SimpleNamespace) -> SimpleNamespace:
        assert request.numMetrics == 1
        assert request.metrics[0].metricId == 2
        request.metrics[0].value = 55.0 if isinstance(request.sample1["of"], str) else 33.0
        return request


@contextmanager
def two_workers(tmp_path: Path, *, busy: bool) -> Iterator[list[Path]]:
    """Two child processes that spin or sleep, and write the CPU seconds that they count themselves."""
    files = [tmp_path / f"cpu{number}.txt" for number in range(2)]
    workers = [subprocess.Popen([sys.executable, "-c", _SPINNER.format(busy=busy), str(file)]) for file in files]
    try:
        while not all(file.exists() and file.read_text() for file in files):
            time.sleep(0.02)
        yield files
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def own_count_s(files: list[Path]) -> float:
    total = 0.0
    for file in files:
        while not (text := file.read_text()):  # between the truncation and the write
            pass
        total += float(text)
    return total


def test_spinning_workers_are_counted_although_the_main_process_sleeps(tmp_path: Path) -> None:
    # On a busy machine two spinning processes get less than 200 %, so their own count is the truth; and it comes late
    # there, so that one close window of three is enough.
    differences = []
    with two_workers(tmp_path, busy=True) as files, Monitor(UnreadableGpu("none")) as monitor:
        while len(differences) < 3 and not any(difference < 20 for difference in differences):
            counted, started = own_count_s(files), time.perf_counter()
            monitor.open_window()
            time.sleep(2.5)
            usage = monitor.close_window()
            truth = 100 * (own_count_s(files) - counted) / (time.perf_counter() - started)
            measured = usage.readings["cpu_percent"].value
            assert measured is not None
            assert measured > 20
            # This process and the two; what earlier tests started (multiprocessing's fork server) may live on.
            assert usage.processes >= 3
            differences.append(abs(measured - truth))
    assert min(differences) < 20


def test_what_other_processes_use_is_told_apart(tmp_path: Path) -> None:
    # The meter looks at one of two workers, which sleeps; the other spins outside of that tree.
    asleep = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        with two_workers(tmp_path, busy=True), Monitor(UnreadableGpu("none"), pid=asleep.pid) as monitor:
            monitor.open_window()
            time.sleep(1.5)
            readings = monitor.close_window().readings
    finally:
        asleep.kill()
        asleep.wait()
    assert (readings["cpu_percent"].value or 0.0) < 15.0
    other = readings["other_cpu_percent"]
    assert (other.value or 0.0) > 50.0 or "part of the machine" in other.reason


def test_sleeping_workers_use_almost_nothing_but_not_exactly_nothing(tmp_path: Path) -> None:
    with two_workers(tmp_path, busy=False), Monitor(UnreadableGpu("none")) as monitor:
        monitor.open_window()
        time.sleep(2.0)
        measured = monitor.close_window().readings["cpu_percent"].value
    assert measured is not None
    assert 0.0 < measured < 15.0


def test_cpu_time_of_a_worker_that_ended_inside_the_window_counts() -> None:
    before = read_tree_usage(os.getpid()).cpu_s
    subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.6: pass"], check=True)
    assert read_tree_usage(os.getpid()).cpu_s - before >= 0.55


def test_a_first_window_is_never_zero() -> None:
    with Monitor(UnreadableGpu("none")) as monitor:
        monitor.open_window()
        until = time.process_time() + 0.1
        while time.process_time() < until:
            pass
        assert (monitor.close_window().readings["cpu_percent"].value or 0.0) > 5.0


def test_a_window_that_was_not_opened_cannot_close() -> None:
    with Monitor(UnreadableGpu("none")) as monitor, pytest.raises(RuntimeError, match="open_window"):
        monitor.close_window()


def test_memory_of_children_counts_and_shared_pages_count_once() -> None:
    alone = read_tree_pss_mb(os.getpid()).value
    size = 80_000_000
    block = bytearray(os.urandom(1024) * (size // 1024))
    with_block = read_tree_pss_mb(os.getpid()).value
    assert alone is not None
    assert with_block is not None
    assert with_block - alone == pytest.approx(size / 1e6, rel=0.15)
    code = (
        f"import time\nb = bytearray({size})\nb[::4096] = b'x' * len(b[::4096])\nprint(1, flush=True)\ntime.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        child.stdout.readline()
        both = read_tree_pss_mb(os.getpid()).value
    finally:
        child.kill()
        child.communicate()
    assert both is not None
    assert both - with_block > 0.8 * size / 1e6
    assert len(block)


def test_what_cannot_be_read_of_a_process_says_why() -> None:
    reading = read_tree_pss_mb(2**22 + 5)
    assert reading.value is None
    assert reading.reason


def test_sampling_costs_little() -> None:
    with Monitor(UnreadableGpu("none")) as monitor:
        monitor.open_window()
        time.sleep(2.0)
        measured = monitor.close_window().readings["cpu_percent"].value
    assert measured is not None
    assert measured < 5.0


def test_cores_available_respect_the_affinity() -> None:
    if not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores and sched_setaffinity")
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert cores_available() <= 1.0
    finally:
        os.sched_setaffinity(0, allowed)


def test_a_readable_card_gives_every_reading() -> None:
    nvml = StubNvml()
    meter = open_gpu_meter("cuda:0", nvml=nvml, environment={})
    assert isinstance(meter, GpuMeter)
    meter.open_window()
    time.sleep(0.35)
    readings = meter.close_window()
    meter.close()
    assert {name: reading.value for name, reading in readings.items()} == {
        "gpu_util_percent": 70.0,
        "gpu_sm_active_percent": 55.0,
        "jpeg_engine_percent": 40.0,
        "gpu_memory_mb": 2000.0,
        "gpu_power_w": 350.0,
    }
    assert nvml.gpm_samples == 0
    assert nvml.shut_down == 1


@pytest.mark.parametrize(
    ("failing", "field"),
    [
        ("nvmlDeviceGetUtilizationRates", "gpu_util_percent"),
        ("nvmlDeviceGetJpgUtilization", "jpeg_engine_percent"),
        ("nvmlDeviceGetPowerUsage", "gpu_power_w"),
        ("nvmlGpmQueryDeviceSupport", "gpu_sm_active_percent"),
        ("nvmlGpmSampleGet", "gpu_sm_active_percent"),
        ("nvmlGpmMetricsGet", "gpu_sm_active_percent"),
    ],
)
def test_one_unsupported_call_makes_one_reading_none_with_its_reason(failing: str, field: str) -> None:
    meter = open_gpu_meter("cuda:0", nvml=StubNvml(failing=(failing,)), environment={})
    meter.open_window()
    time.sleep(0.15)
    readings = meter.close_window()
    meter.close()
    assert readings[field].value is None
    assert "Not Supported" in readings[field].reason
    assert all(reading.value is not None for name, reading in readings.items() if name != field)


def test_without_nvml_every_reading_is_none_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    readings = open_gpu_meter("cuda:0").close_window()
    assert set(readings) == set(GPU_FIELDS)
    assert all(r.value is None and "cannot be imported" in r.reason for r in readings.values())


def test_an_nvml_that_does_not_start_is_a_reason_not_a_crash() -> None:
    meter = open_gpu_meter("cuda:0", nvml=StubNvml(failing=("nvmlInit",)))
    assert isinstance(meter, UnreadableGpu)
    assert "NVML does not start: Not Supported" in meter.reason


def test_a_run_on_the_cpu_reads_no_gpu() -> None:
    meter = open_gpu_meter("cpu", nvml=StubNvml())
    assert all(r == Reading(None, "the run uses no GPU (device cpu)") for r in meter.close_window().values())


@pytest.mark.parametrize(
    ("visible", "ordinal", "handle"),
    [
        (None, 1, "card1"),
        ("1,0", 0, "card1"),
        ("1,0", 1, "card0"),
        ("1", 0, "card1"),
        ("GPU-bbbb-1111,GPU-aaaa-0000", 0, "card1"),
        ("GPU-bb", 0, "card1"),
        ("MIG-cccc-2222", 0, "mig"),
    ],
)
def test_cuda_numbers_lead_to_the_right_card(visible: str | None, ordinal: int, handle: str) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert find_card(StubNvml(), ordinal, environment).handle == handle


def test_the_uuid_that_cuda_tells_wins_over_the_variable() -> None:
    assert find_card(StubNvml(), 0, {"CUDA_VISIBLE_DEVICES": "0"}, uuid="bbbb-1111").handle == "card1"
    assert find_card(StubNvml(), 0, {}, uuid="cccc-2222").gpu_instance == 5


@pytest.mark.parametrize("visible", ["", "0", "GPU-ffff"])
def test_a_device_that_is_not_visible_is_a_reason(visible: str) -> None:
    ordinal = 0 if visible.startswith("GPU") else 1
    meter = open_gpu_meter(f"cuda:{ordinal}", nvml=StubNvml(), environment={"CUDA_VISIBLE_DEVICES": visible})
    assert isinstance(meter, UnreadableGpu)
    assert "CUDA_VISIBLE_DEVICES" in meter.reason


@pytest.mark.parametrize("environment", [{"CUDA_VISIBLE_DEVICES": "MIG-cccc-2222"}, {}])
def test_under_mig_utilisation_is_none_with_the_reason_and_the_instance_is_read(environment: dict[str, str]) -> None:
    meter = open_gpu_meter("cuda:0", nvml=StubNvml(mig=True), environment=environment)
    meter.open_window()
    time.sleep(0.15)
    readings = meter.close_window()
    meter.close()
    assert readings["gpu_util_percent"] == Reading(None, "Not Supported")
    assert readings["gpu_sm_active_percent"].value == 33.0  # of the instance, not of the whole card


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    for number in range(3):
        (tmp_path / f"{number}.bin").write_bytes(os.urandom(300_000))
    return data_files(str(tmp_path)) or []


def test_dropped_files_leave_the_page_cache_and_read_ones_are_in_it(files: list[Path]) -> None:
    read_all(files)
    assert resident_percent(files).value == 100.0
    drop(files)
    left = resident_percent(files).value
    if left == 100.0:
        pytest.skip("this file system keeps its files in memory")
    assert left == 0.0


def test_cold_and_warm_states_say_what_is_true(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    keeper, folder = CacheKeeper(), str(files[0].parent)
    warm = keeper.prepare(folder, "warm")
    assert (warm["cache"], warm["resident_percent"], warm["note"]) == ("warm", 100.0, "")
    monkeypatch.setattr(pagecache, "drop", lambda _: None)  # a system that declines
    refused = keeper.prepare(folder, "cold")
    assert refused["cache"] == "warm"
    assert "asked to be cold, but 100 %" in refused["note"]


def test_data_larger_than_memory_are_not_called_cached(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pagecache.psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    monkeypatch.setattr(pagecache, "resident_percent", lambda _: Reading(12.0))
    state = CacheKeeper().prepare(str(files[0].parent), "warm")
    assert state["resident_percent"] == 12.0
    assert "do not fit" in state["note"]


def test_remote_data_have_no_page_cache() -> None:
    assert CacheKeeper().prepare("https://example.org/shard-{000..009}.tar", "warm")["resident_percent"] is None
