"""Every host backend on converted shards gives what it gives on the folder, and keeps the contract there."""

from __future__ import annotations

import tarfile
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import fastdata
from fastdata.errors import ShardError, UsageError
from fastdata.testing import PipelineConformance, write_numbered_folder, write_varied_folder
from tests.shard_files import convert_with_damage, write_numbered_shards

TRAIN = (fastdata.RandomResizedCrop(48), fastdata.RandomHorizontalFlip(), fastdata.Normalize())


class TestWebDatasetOnShards(PipelineConformance):
    backend = "webdataset"

    def make_data(self, folder: Path) -> Path:
        return convert_with_damage(folder)


@pytest.mark.parametrize("backend", ["pil", "torchvision", "webdataset"])
def test_shards_give_the_ids_labels_windows_and_pixels_of_their_folder(backend: str, tmp_path: Path) -> None:
    folder = write_varied_folder(tmp_path / "varied")
    shards = convert_with_damage(folder)
    runs = []
    for data, name in ((folder, "pil"), (shards, backend)):
        with fastdata.open_pipeline(
            data, backend=name, transform=TRAIN, batch_size=5, dtype="uint8", seed=3, workers=2
        ) as loader:
            loader.set_epoch(2)
            runs.append(list(loader))
    for expected, found in zip(*runs, strict=True):
        assert found.ids.tolist() == expected.ids.tolist()
        assert found.labels.tolist() == expected.labels.tolist()
        difference = (found.images.double() - expected.images.double()).abs().mean(dim=(1, 2, 3))
        assert difference.max() <= 0.05


@pytest.mark.parametrize("backend", ["pil", "torchvision"])
def test_a_backend_gives_the_same_bits_on_shards_as_on_the_folder(backend: str, tmp_path: Path) -> None:
    folder = write_varied_folder(tmp_path / "varied")
    images = []
    for data in (folder, convert_with_damage(folder)):
        with fastdata.open_pipeline(data, backend=backend, transform=TRAIN, batch_size=24, dtype="uint8") as loader:
            images.append(next(iter(loader)).images)
    assert torch.equal(images[0], images[1])


@pytest.mark.parametrize("backend", ["pil", "torchvision", "webdataset"])
def test_block_shuffle_reads_shards_in_blocks_and_gives_each_id_once(backend: str, tmp_path: Path) -> None:
    shards = convert_with_damage(write_numbered_folder(tmp_path / "numbered", 10))
    with fastdata.open_pipeline(
        shards,
        backend=backend,
        transform=fastdata.Resize((16, 16)),
        batch_size=8,
        shuffle=fastdata.BlockShuffle(shards=2),
        workers=1,
    ) as loader:
        orders = [[i for batch in loader for i in batch.ids.tolist()] for _ in range(2)]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(40))
    assert orders[0] != orders[1]


def test_a_folder_is_refused_with_the_way_to_shards(tmp_path: Path) -> None:
    folder = write_numbered_folder(tmp_path / "numbered", 2)
    with pytest.raises(UsageError, match="fastdata shard"):
        fastdata.open_pipeline(folder, backend="webdataset", transform=fastdata.Resize((16, 16)), batch_size=2)


def test_a_cut_shard_of_another_writer_raises_or_is_skipped_and_reported(tmp_path: Path) -> None:
    shards = write_numbered_shards(tmp_path / "shards", [10, 10])
    cut = shards / "shard-000001.tar"
    with tarfile.open(cut) as tar:
        offset = tar.getmember("000000016.jpg").offset_data
    cut.write_bytes(cut.read_bytes()[: offset + 300])
    arguments = {"transform": fastdata.Resize((16, 16)), "batch_size": 4, "workers": 1}
    for backend in ("pil", "torchvision", "webdataset"):
        with pytest.raises(ShardError, match=r"shard-000001\.tar"):
            fastdata.open_pipeline(shards, backend=backend, **arguments)
        with fastdata.open_pipeline(shards, backend=backend, on_error="skip", **arguments) as loader:
            for _ in range(2):
                assert sum(len(batch) for batch in loader) == 16
                assert [item.reason.count("shard-000001.tar") for item in loader.report().skipped] == [1]


def test_block_shuffle_has_each_next_block_read_once_in_storage_order(tmp_path: Path) -> None:
    shards = convert_with_damage(write_numbered_folder(tmp_path / "numbered", 30))
    with fastdata.open_pipeline(
        shards,
        backend="webdataset",
        transform=fastdata.Resize((16, 16)),
        batch_size=8,
        shuffle=fastdata.BlockShuffle(2),
        workers=1,
    ) as loader:
        asked: list[int] = []
        loader.source.will_need = lambda positions: asked.extend(positions.tolist())  # type: ignore[method-assign]
        seen = [i for step in loader._plan(0, 0) for i in step.positions.tolist()]
        layout = loader.source.layout
    assert layout is not None
    first_block = len(seen) - len(asked)
    assert 0 < first_block < len(seen) / 2
    assert sorted(asked) == sorted(seen[first_block:])
    stored = {int(p): place for place, p in enumerate(layout.storage_order)}
    jumps = sum(stored[b] != stored[a] + 1 for a, b in pairwise(asked))
    assert jumps < len(layout.shard_starts)
