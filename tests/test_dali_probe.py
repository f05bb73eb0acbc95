"""What `fastdata backends` says about DALI: each thing that is missing, and what to do about it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fastdata
from fastdata.backends._dali_probe import Probes, describe_dali, gpu_fault
from fastdata.errors import BackendUnavailableError
from fastdata.testing import write_numbered_folder

HEALTHY = Probes(
    package=lambda: "2.4.0 cuda120",
    importing=lambda: None,
    device_files=lambda: {"/dev/nvidiactl": True, "/dev/nvidia0": True},
    driver=lambda: (0, 12080),
    engine=lambda _: True,
)


def test_a_healthy_machine_has_nothing_to_remedy() -> None:
    works, reason, remedy = describe_dali(HEALTHY)
    assert works
    assert "JPEG engines" in reason
    assert remedy == ""


@pytest.mark.parametrize(
    ("change", "works", "says", "advises"),
    [
        ({"package": lambda: None}, False, "not installed", "pip install nvidia-dali-cuda120"),
        ({"importing": lambda: "OSError: libx.so"}, False, "libx.so", "Reinstall"),
        (
            {"device_files": lambda: {"/dev/nvidia0": False}, "driver": lambda: (100, 12020)},
            True,
            "no permission to use /dev/nvidia0",
            "--gpus",
        ),
        (
            {"device_files": lambda: {"/dev/nvidia0": False}, "driver": lambda: None},
            True,
            "no permission to use /dev/nvidia0",
            "--gpus",
        ),
        ({"driver": lambda: None}, True, "no driver library", "NVIDIA runtime"),
        ({"driver": lambda: None, "device_files": dict}, True, "no NVIDIA driver and no GPU", 'device="cpu"'),
        ({"driver": lambda: (0, 11040)}, True, "offers CUDA 11.4, DALI needs 12.0", "Update the driver"),
        ({"driver": lambda: (803, 12020)}, True, "different versions", "nvidia-smi"),
        ({"driver": lambda: (100, 12020)}, True, "sees no GPU", "nvidia-smi"),
        ({"engine": lambda _: False}, True, "no JPEG engine", "decode_threads"),
    ],
)
def test_each_fault_is_named_with_a_remedy(
    change: dict[str, object], works: bool, says: str, advises: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found_works, reason, remedy = describe_dali(replace(HEALTHY, **change))
    assert found_works is works
    assert says in reason
    assert advises in remedy


def test_other_peoples_gpus_do_not_stand_in_the_way_of_ones_own() -> None:
    shared = replace(
        HEALTHY, device_files=lambda: {"/dev/nvidiactl": True, "/dev/nvidia0": False, "/dev/nvidia3": True}
    )
    assert gpu_fault(shared) is None
    assert describe_dali(shared)[2] == ""


def test_hidden_gpus_are_told_apart_from_missing_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    fault = gpu_fault(replace(HEALTHY, driver=lambda: (100, 12080)))
    assert fault is not None
    assert "hides all GPUs" in fault.reason


def test_a_dali_for_cuda_13_wants_a_newer_driver() -> None:
    fault = gpu_fault(replace(HEALTHY, package=lambda: "2.4.0 cuda130"))
    assert fault is not None
    assert "DALI needs 13.0" in fault.reason


def test_the_backend_is_listed_and_explained_where_dali_is_not_installed() -> None:
    script = (
        "import sys\n"
        "sys.modules['nvidia.dali'] = None\n"
        "import importlib.util as u\n"
        "real = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'nvidia.dali' else real(name, *a)\n"
        "from fastdata.registry import check_backend\n"
        "found = check_backend('dali')\n"
        "assert not found.works and 'not installed' in found.reason and 'pip install' in found.remedy, found\n"
        "assert 'torch' not in sys.modules and 'numba' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_a_gpu_that_is_not_there_is_refused_at_construction(tmp_path: Path) -> None:
    pytest.importorskip("nvidia.dali", reason="NVIDIA DALI is not installed")
    if gpu_fault() is None:
        pytest.skip("this machine has a GPU")
    root = write_numbered_folder(tmp_path / "numbered", 2)
    with pytest.raises(BackendUnavailableError, match='device="cuda:0"'):
        fastdata.open_pipeline(
            root, backend="dali", transform=fastdata.imagenet_eval(32), batch_size=2, device="cuda:0"
        )


@pytest.mark.parametrize(("index", "available"), [(0, False), (7, True)], ids=["torch without CUDA", "no such number"])
def test_a_gpu_that_torch_cannot_use_is_refused_at_construction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: int, available: bool
) -> None:
    pytest.importorskip("nvidia.dali", reason="NVIDIA DALI is not installed")
    root = write_numbered_folder(tmp_path / "numbered", 2)
    monkeypatch.setattr("fastdata.backends.dali.gpu_fault", lambda: None)  # the driver is fine
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2 if available else 0)
    monkeypatch.setattr(torch.cuda, "init", _no_cuda)
    with pytest.raises(BackendUnavailableError, match="torch sees 2 GPUs" if available else "not compiled with CUDA"):
        fastdata.open_pipeline(
            root, backend="dali", transform=fastdata.imagenet_eval(32), batch_size=2, device=f"cuda:{index}"
        )


def _no_cuda() -> None:
    raise AssertionError("Torch not compiled with CUDA enabled")
