"""What is impossible is refused when the pipeline is opened, by one error that names it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import fastdata
from fastdata.cli import make_app
from fastdata.errors import BackendUnavailableError, SourceError, StateError, UsageError
from fastdata.shards import ConvertOptions, convert_folder
from fastdata.testing import write_numbered_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_numbered_folder(tmp_path / "photos", 4)
    return tmp_path / "photos"


def opened(data: Any, **arguments: Any) -> fastdata.Pipeline:
    settings = {"backend": "pil", "transform": fastdata.imagenet_eval(16), "batch_size": 2, "workers": 1}
    return fastdata.open_pipeline(data, **(settings | arguments))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seed", "a"),
        ("seed", 1.5),
        ("shuffle", "yes"),
        ("shuffle", None),
        ("drop_last", "no"),
    ],
)
def test_values_of_a_wrong_type_are_named(folder: Path, name: str, value: object) -> None:
    with pytest.raises(UsageError, match=f"^{name}: ") as raised:
        opened(folder, **{name: value})
    assert repr(value) in str(raised.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.uint8])
def test_a_dtype_may_be_torchs(folder: Path, dtype: torch.dtype) -> None:
    with opened(folder, dtype=dtype) as loader:
        images, _ = next(iter(loader))
    assert images.dtype == dtype


def test_a_dtype_of_torch_that_no_pipeline_delivers_is_named(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"^dtype: 'int32'; expected one of"):
        opened(folder, dtype=torch.int32)


def test_ranks_that_are_no_numbers_are_named(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"^rank: '0'; expected an int"):
        opened(folder, rank="0", world_size="2")


@pytest.mark.parametrize("data", [None, 3])
def test_data_that_are_no_paths_are_named(data: object) -> None:
    with pytest.raises(UsageError, match=f"^data: {data}; expected a folder"):
        opened(data)


def test_a_picture_in_place_of_a_folder_is_called_a_picture(folder: Path) -> None:
    picture = next(folder.glob("*/*"))
    with pytest.raises(SourceError, match="a picture; expected a folder of pictures"):
        opened(picture)


def test_a_state_that_is_none_is_named(folder: Path) -> None:
    with opened(folder) as loader, pytest.raises(StateError, match="None; expected what state_dict"):
        loader.load_state_dict(None)  # type: ignore[arg-type]


def test_a_state_of_another_version_is_refused_with_its_version(folder: Path) -> None:
    with opened(folder) as loader, pytest.raises(StateError, match=r"version 1, keys .*; expected a version 2 state"):
        loader.load_state_dict({**loader.state_dict(), "version": 1})


def test_a_setting_that_a_config_cannot_change_is_refused(folder: Path, tmp_path: Path) -> None:
    config = tmp_path / "settings.json"
    config.write_text('{"batch_size": 4}')
    with pytest.raises(UsageError, match="batch_size"):
        opened(folder, config=config)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("backend", ["pil", "torchvision", "webdataset", "dali"])
@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_a_gpu_that_is_not_there_is_refused_before_the_first_batch(
    folder: Path, tmp_path: Path, backend: str, device: str
) -> None:
    convert_folder(folder, tmp_path / "shards", ConvertOptions())
    with pytest.raises(BackendUnavailableError, match=f'^{backend} on device="cuda:0": .*device="cpu"'):
        opened(tmp_path / "shards", backend=backend, device=device)


def test_a_gpu_number_beyond_the_last_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(BackendUnavailableError, match="torch sees 2 GPUs, cuda:0 to cuda:1"):
        opened(folder, device="cuda:2")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU can lock pages")
@pytest.mark.parametrize("backend", ["pil", "dali"])
def test_page_locked_memory_without_a_gpu_is_refused(folder: Path, backend: str) -> None:
    with pytest.raises(UsageError, match="pin_memory"):
        opened(folder, backend=backend, pin_memory=True)


def test_findings_that_could_not_be_written_are_refused_before_anything_is_checked(
    folder: Path, tmp_path: Path
) -> None:
    result = CliRunner().invoke(make_app(), ["check", str(folder), "--json", str(tmp_path / "missing" / "a.json")])
    assert isinstance(result.exception, UsageError)
    assert "its folder does not exist" in str(result.exception)
