"""Our shards are read by plain webdataset, Hugging Face datasets, DALI and GNU tar, with the same bytes and labels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fastdata.decode import decode_reference
from fastdata.shards import ConvertOptions, convert_folder
from fastdata.sources.folder import FolderSource, open_folder
from fastdata.sources.tar import open_shards
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


@pytest.fixture(scope="module")
def ready(folder: FolderSource) -> Path:
    """Return crop-ready shards, all of whose files were rewritten."""
    out = Path(folder.root).parent / "crop-ready shards"
    convert_folder(folder.root, out, ConvertOptions(max_bytes=20_480, crop_ready=True, max_growth=10))
    source = open_shards(out)
    assert all(source.read(i) != folder.read(i) for i in range(len(folder)))
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


@pytest.mark.parametrize("form", ["out", "ready"])
@pytest.mark.parametrize("indexed", [False, True], ids=["index inferred", "index of wds2idx"])
def test_dalis_own_reader_reads_them(
    folder: FolderSource, form: str, indexed: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    pytest.importorskip("nvidia.dali", reason="NVIDIA DALI is not installed")
    from nvidia.dali import Pipeline, fn

    source = open_shards(request.getfixturevalue(form))
    assert source.labels is not None
    tars = [shard.name for shard in source.index.shards]
    indexes = [str(tmp_path / f"{number}.idx") for number in range(len(tars))]
    if indexed:
        for tar, index in zip(tars, indexes, strict=True):
            subprocess.run([sys.executable, "-m", "wds2idx", tar, index], check=True, capture_output=True)
    pipeline = Pipeline(batch_size=1, num_threads=1, device_id=None)
    with pipeline:
        pipeline.set_outputs(
            *fn.readers.webdataset(
                paths=tars,
                index_paths=indexes if indexed else None,
                ext=["jpg", "cls"],
                missing_component_behavior="error",
                name="reader",
            )
        )
    pipeline.build()
    assert pipeline.epoch_size("reader") == len(folder)
    found = [[output.at(0).tobytes() for output in pipeline.run()] for _ in range(len(folder))]
    assert [(int(label), picture) for picture, label in found] == [
        (int(source.labels[position]), bytes(source.read(position))) for position in source.index.storage_order
    ]


@_webdatasets_open_files
def test_plain_webdataset_decodes_crop_ready_shards_to_the_same_pixels(folder: FolderSource, ready: Path) -> None:
    import webdataset

    urls = sorted(str(path) for path in ready.glob("*.tar"))
    dataset = webdataset.WebDataset(urls, shardshuffle=False).decode("rgb8").to_tuple("jpg", "cls", "__key__")
    found = {key: (label, pixels) for pixels, label, key in dataset}
    assert found.keys() == expected(folder).keys()
    for key, (label, data) in expected(folder).items():
        assert found[key][0] == label
        assert (found[key][1] == decode_reference(data)).all()
