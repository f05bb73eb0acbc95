"""Indexed shards as a source: bytes, handles, threads, processes, and sets that are cut or incomplete (kind K8)."""

from __future__ import annotations

import os
import pickle
import resource
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fastdata.errors import ShardError, SourceError, UsageError
from fastdata.order import make_order
from fastdata.shards import ConvertOptions, convert_folder
from fastdata.sources.folder import FolderSource, open_folder
from fastdata.sources.mapping import advise_will_need, map_file
from fastdata.sources.open import open_source
from fastdata.sources.paths import PathTable
from fastdata.sources.shardindex import INDEX_NAME, ShardIndex, ShardInfo, read_index, write_index
from fastdata.sources.tar import TarSource, open_shards
from fastdata.spec import BlockShuffle
from tests.pictures import tree

CAP = 10_240  # three samples a shard


@pytest.fixture
def folder(tmp_path: Path) -> FolderSource:
    tree(tmp_path / "tree", 10)
    return open_folder(tmp_path / "tree")


@pytest.fixture
def out(folder: FolderSource, tmp_path: Path) -> Path:
    convert_folder(folder.root, tmp_path / "out", ConvertOptions(max_bytes=CAP))
    return tmp_path / "out"


def test_it_is_the_folder_it_came_from(folder: FolderSource, out: Path) -> None:
    source = open_source(out)
    assert source.ids.tolist() == folder.ids.tolist()
    assert source.labels is not None
    assert folder.labels is not None
    assert source.labels.tolist() == folder.labels.tolist()
    assert (source.classes, source.fingerprint) == (folder.classes, folder.fingerprint)
    assert all(source.read(i) == folder.read(i) for i in range(len(folder)))


def test_reads_are_views_into_the_mapped_shard(out: Path) -> None:
    source = open_shards(out)
    view = source.read(3)
    assert view.readonly
    assert view.obj is source.read(source.layout.storage_order[0]).obj or view.obj is not None
    before = bytes(view)
    source.close()
    source.close()
    assert bytes(view) == before  # memory of a sample that is held stays valid
    assert source.read(3) == before


def test_the_place_of_a_sample_names_shard_and_member(out: Path) -> None:
    source = open_shards(out)
    for i in range(len(source)):
        shard, _, member = source.where(i).partition(" member ")
        assert os.path.dirname(shard) == str(out)
        assert member == f"{i:09d}.jpg"


def test_no_labels_where_none_are_asked_for(out: Path) -> None:
    source = open_shards(out, labels=None)
    assert (source.labels, source.classes) == (None, ())
    with pytest.raises(UsageError, match="labels"):
        open_shards(out, labels=lambda _: 1)


def test_block_shuffle_reads_each_sample_once_and_shards_in_blocks(out: Path) -> None:
    source = open_shards(out)
    assert source.layout is not None
    assert np.array_equal(np.diff(source.layout.shard_starts), [3] * 13 + [1])
    order = make_order(BlockShuffle(shards=2), len(source), source.layout, seed=1, epoch=0).positions(0, len(source))
    assert sorted(order.tolist()) == list(range(40))
    shard_of = source.index.columns["shard"][order]
    assert len(set(shard_of[:4].tolist())) <= 2


def test_many_threads_read_the_same_bytes(folder: FolderSource, out: Path) -> None:
    source = open_shards(out)
    barrier = threading.Barrier(8)

    def read_all(seed: int) -> bool:
        barrier.wait()
        return all(source.read(i) == folder.read(i) for i in np.random.default_rng(seed).permutation(len(source)))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read_all, range(8)))


def test_another_process_maps_the_index_instead_of_getting_a_copy(out: Path) -> None:
    source = open_shards(out)
    sent = pickle.dumps(source)
    again = pickle.loads(sent)
    assert b"ant/0000.JPEG" not in sent
    assert again.ids.tolist() == source.ids.tolist()
    assert all(again.read(i) == source.read(i) for i in range(len(source)))


def test_another_process_never_gets_another_index(folder: FolderSource, out: Path) -> None:
    sent = pickle.dumps(open_shards(out))
    convert_folder(folder.root, out, ConvertOptions(max_bytes=CAP, seed=1), overwrite=True)
    with pytest.raises(ShardError, match="Open it again"):
        pickle.loads(sent)


def test_shards_hold_no_file_descriptors(out: Path) -> None:
    """B99 b: epochs over more shards than descriptors are allowed."""
    source = open_shards(out)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    counts = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 8, hard))
    try:
        for _ in range(3):
            for i in range(len(source)):
                source.read(i)
            counts.append(len(os.listdir("/proc/self/fd")))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert counts[0] == counts[2]


def test_read_ahead_takes_any_positions(out: Path) -> None:
    source = open_shards(out)
    source.will_need(np.array([5, 1, 39, 5], np.int64))
    source.will_need(np.arange(len(source)))
    source.will_need(np.empty(0, np.int64))


def test_neighbours_become_one_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fastdata.sources import mapping

    (tmp_path / "file").write_bytes(bytes(100_000))
    _, address = map_file(tmp_path / "file")
    asked: list[tuple[int, int]] = []

    class Library:
        @staticmethod
        def madvise(start: int, size: int, _advice: int) -> int:
            asked.append((start - address, size))
            return 0

    monkeypatch.setattr(mapping, "_c_library", Library)
    advise_will_need(address, np.array([600, 5000, 60_000]), np.array([4000, 9000, 70_000]))
    assert asked == [(0, 9000), (57_344, 70_000 - 57_344)]


def test_a_cut_shard_is_an_error_that_names_it(out: Path) -> None:
    """B74, on a set with an index."""
    os.truncate(out / "shard-000002.tar", 5000)
    with pytest.raises(ShardError, match=r"shard-000002\.tar: 5000 bytes; expected 10240 bytes"):
        open_shards(out)
    with pytest.raises(ShardError, match=r"shard-000002\.tar"):
        open_shards([str(path) for path in out.glob("*.tar")])


def test_what_is_whole_in_a_cut_shard_is_read_where_damage_is_skipped(folder: FolderSource, out: Path) -> None:
    """B74: three samples in the shard, cut in the second picture."""
    whole = open_shards(out)
    assert whole.layout is not None
    lost = whole.layout.storage_order[whole.layout.shard_starts[2] + 1 : whole.layout.shard_starts[3]]
    offset = int(whole.index.columns["offset"][lost[0]])
    os.truncate(out / "shard-000002.tar", offset + 100)
    source = open_shards(out, skip_damaged=True)
    assert len(source.faults) == 1
    assert "shard-000002.tar" in source.faults[0]
    assert source.ids.tolist() == [i for i in range(40) if i not in lost]
    assert all(source.read(i) == folder.read(int(source.ids[i])) for i in range(len(source)))
    again = pickle.loads(pickle.dumps(source))
    assert again.ids.tolist() == source.ids.tolist()


def test_a_missing_shard_is_named(out: Path) -> None:
    """B75, on a set with an index."""
    (out / "shard-000004.tar").unlink()
    with pytest.raises(ShardError, match=r"1 of 14 shards missing: .*shard-000004\.tar"):
        open_shards(out)
    with pytest.warns(UserWarning, match="1 shard missing"):
        source = open_shards(out, allow_missing=True)
    assert len(source) == 37


def test_a_surplus_shard_is_named(out: Path) -> None:
    (out / "shard-000099.tar").write_bytes((out / "shard-000000.tar").read_bytes())
    with pytest.raises(ShardError, match=r"shard-000099\.tar: a shard that the index beside it does not know"):
        open_shards(out)


def test_some_shards_of_a_set_keep_the_folders_ids(folder: FolderSource, out: Path) -> None:
    source = open_shards(f"{out}/shard-{{000003..000005}}.tar")
    assert len(source) == 9
    assert [shard.samples for shard in source.index.shards] == [3, 3, 3]
    assert all(source.read(i) == folder.read(int(source.ids[i])) for i in range(9))


@pytest.mark.parametrize("cut", [0, 10, 40, -1])
def test_a_damaged_index_is_an_error_that_names_it(out: Path, cut: int) -> None:
    path = out / INDEX_NAME
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data[:cut])
    with pytest.raises(SourceError, match=r"index\.fastdata"):
        open_shards(out)


def test_an_index_of_a_later_version_is_refused(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastdata.sources.shardindex.FORMAT_VERSION", 0)
    with pytest.raises(ShardError, match=r"format version 2; expected at most 0\. Upgrade fastdata"):
        open_shards(out)


def test_a_fingerprint_of_an_earlier_index_version_is_made_anew(
    out: Path, folder: FolderSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = read_index(out / INDEX_NAME)
    with monkeypatch.context() as earlier:
        earlier.setattr("fastdata.sources.shardindex.FORMAT_VERSION", 1)
        write_index(out / INDEX_NAME, replace(index, fingerprint="0" * 32))
    assert open_shards(out).fingerprint == index.fingerprint == folder.fingerprint


def write_large_index(path: Path, samples: int, shards: int) -> None:
    """Write an index as the converter does, of samples that are nowhere."""
    per_shard = samples // shards
    columns = {
        "ids": np.arange(samples, dtype=np.int64),
        "shard": np.repeat(np.arange(shards, dtype=np.int32), per_shard),
        "offset": np.tile(np.arange(per_shard, dtype=np.int64) * 111_616 + 512, shards),
        "size": np.full(samples, 110_000, np.int64),
        "labels": np.arange(samples, dtype=np.int64) % 1000,
        "width": np.full(samples, 500, np.int32),
        "height": np.full(samples, 375, np.int32),
        "orientation": np.ones(samples, np.uint8),
        "crc32": np.zeros(samples, np.uint32),
    }
    index = ShardIndex(
        shards=tuple(ShardInfo(f"shard-{i:06d}.tar", 2_000_000_000, per_shard, "0" * 64) for i in range(shards)),
        columns=columns,
        paths=PathTable(np.zeros(30 * samples, np.uint8), np.arange(samples + 1, dtype=np.int64) * 30),
        storage_order=np.arange(samples, dtype=np.int64),
        shard_starts=np.arange(shards + 1, dtype=np.int64) * per_shard,
        classes=tuple(f"n{i:08d}" for i in range(1000)),
        fingerprint="0" * 32,
        facts={"stored": "original"},
    )
    write_index(path, index)


def test_a_large_index_opens_at_once_and_costs_no_private_memory(tmp_path: Path) -> None:
    """A million samples here; ten million are measured in benchmarks. Opening must not depend on the number."""
    write_large_index(tmp_path / INDEX_NAME, 1_000_000, 100)
    started_s = time.perf_counter()
    source = TarSource("synthetic", read_index(tmp_path / INDEX_NAME), with_labels=True)
    assert time.perf_counter() - started_s < 1
    code = """
import sys, psutil
from pathlib import Path
from fastdata.sources.shardindex import read_index
from fastdata.sources.tar import TarSource
before = psutil.Process().memory_full_info().uss
source = TarSource("synthetic", read_index(Path(sys.argv[1])), with_labels=True)
total = int(source.ids.sum() + source.labels.sum() + source.index.columns["size"].sum())
print(psutil.Process().memory_full_info().uss - before)
"""
    # A second process maps what the first one reads, so none of it is private to either.
    assert int(source.ids.sum() + source.index.columns["size"].sum()) > 0
    assert source.labels is not None
    assert source.labels.sum() > 0
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / INDEX_NAME], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 10e6


def test_converted_shards_that_lost_their_index_are_refused(tmp_path: Path) -> None:
    tree(tmp_path / "tree", 3)
    convert_folder(tmp_path / "tree", tmp_path / "shards", ConvertOptions())
    (tmp_path / "shards" / INDEX_NAME).unlink()
    with pytest.raises(ShardError, match=r"without index\.fastdata"):
        open_shards(tmp_path / "shards")
