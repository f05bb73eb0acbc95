"""Our shards are read by plain webdataset, Hugging Face datasets and GNU tar, with the same bytes and labels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fastdata.shards import ConvertOptions, convert_folder
from fastdata.sources.folder import FolderSource, open_folder
from tests.pictures import flat, tree

_READ_WITH_DATASETS = """
import os, sys
import datasets
found = datasets.load_dataset("webdataset", data_files={"train": sys.argv[1]}, split="train", cache_dir=sys.argv[2])
found = found.cast_column("jpg", datasets.Image(decode=False))
for row in found:
    print(row["__key__"], row["cls"], row["jpg"]["bytes"].hex())
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> FolderSource:
    """Return a folder with the names that trouble readers (B49, B50, B53, B54, B56, B58)."""
    root = tmp_path_factory.mktemp("readers") / "tree"
    tree(root, 3)
    for number, name in enumerate(
        ("n01.5/22.05.JPEG", "n01.5/22.06.jpeg", "hot dog/é (1).JPG", f"{'c' * 120}/{'f' * 120}.jpg")
    ):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(flat((number, 50, 60)))
    return open_folder(root)


@pytest.fixture(scope="module")
def out(folder: FolderSource) -> Path:
    out = Path(folder.root).parent / "my shards"
    convert_folder(folder.root, out, ConvertOptions(max_bytes=20_480))
    return out


def expected(folder: FolderSource) -> dict[str, tuple[int, bytes]]:
    assert folder.labels is not None
    return {f"{i:09d}": (int(folder.labels[i]), folder.read(i)) for i in range(len(folder))}


_webdatasets_open_files = pytest.mark.filterwarnings(
    "ignore:Exception ignored in.*FileIO:pytest.PytestUnraisableExceptionWarning",
    "ignore:unclosed file:ResourceWarning",
)  # it leaves closing to the garbage collector


@_webdatasets_open_files
def test_plain_webdataset_reads_them(folder: FolderSource, out: Path) -> None:
    import webdataset

    urls = sorted(str(path) for path in out.glob("*.tar"))
    assert len(urls) > 1
    dataset = webdataset.WebDataset(urls, shardshuffle=False)
    found = {sample["__key__"]: (int(sample["cls"]), sample["jpg"]) for sample in dataset}
    assert found == expected(folder)


@_webdatasets_open_files
def test_webdataset_decodes_labels_to_numbers(folder: FolderSource, out: Path) -> None:
    import webdataset

    urls = sorted(str(path) for path in out.glob("*.tar"))
    dataset = webdataset.WebDataset(urls, shardshuffle=False).decode("rgb8").to_tuple("jpg", "cls", "__key__")
    found = {key: (label, pixels.shape) for pixels, label, key in dataset}
    assert found == {key: (label, (48, 64, 3)) for key, (label, _) in expected(folder).items()}


def test_hugging_face_datasets_reads_them(folder: FolderSource, out: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _READ_WITH_DATASETS, f"{out}/shard-*.tar", tmp_path / "cache"],
        env={**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = (line.split() for line in done.stdout.splitlines() if line)
    assert {key: (int(label), bytes.fromhex(data)) for key, label, data in rows} == expected(folder)


def test_gnu_tar_reads_them(folder: FolderSource, out: Path, tmp_path: Path) -> None:
    for path in sorted(out.glob("*.tar")):
        listed = subprocess.run(["tar", "xf", path], cwd=tmp_path, capture_output=True, text=True, check=True)
        assert listed.stderr == ""
    found = {
        path.stem: (int((tmp_path / f"{path.stem}.cls").read_text()), path.read_bytes())
        for path in tmp_path.glob("*.jpg")
    }
    assert found == expected(folder)
