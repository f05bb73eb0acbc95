"""Reading many files in one call."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest

from fastdata.errors import SourceError
from fastdata.sources import batchread
from fastdata.sources.folder import open_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "hot dog & 猫"
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        (root / name).mkdir(parents=True)
        for number in range(20):
            (root / name / f"{'long' * number}{number:02d}.jpg").write_bytes(rng.bytes(int(rng.integers(0, 40_000))))
    return root


def test_many_files_come_as_they_are_one_by_one(folder: Path) -> None:
    source = open_folder(folder)
    positions = np.random.default_rng(1).permutation(40)
    found = source.read_many(positions)
    assert [bytes(data) for data in found] == [source.read(int(p)) for p in positions]


def test_files_that_do_not_fit_the_room_get_more(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_folder(folder)
    for size in (0, 1, 1000, 100_000):
        monkeypatch.setattr(batchread._room_of_thread, "memory", np.empty(size, np.uint8))
        found = source.read_many(np.arange(40))
        assert [bytes(data) for data in found] == [source.read(p) for p in range(40)]
        assert len(batchread._room_of_thread.memory) > 100_000
        again = source.read_many(np.arange(40))
        room = batchread._room_of_thread.memory
        assert all(np.shares_memory(np.frombuffer(data, np.uint8), room) for data in again if len(data))


def test_a_file_that_is_gone_is_named_and_the_others_arrive(folder: Path) -> None:
    source = open_folder(folder)
    os.remove(source.path(7))
    found = source.read_many(np.arange(40))
    assert isinstance(found[7], SourceError)
    assert os.fsdecode(source.path(7)) in str(found[7])
    assert [i for i, data in enumerate(found) if isinstance(data, SourceError)] == [7]


def test_threads_do_not_share_their_room(folder: Path) -> None:
    source = open_folder(folder)
    expected = [source.read(p) for p in range(40)]
    wrong: list[int] = []

    def work(seed: int) -> None:
        positions = np.random.default_rng(seed).permutation(40)
        for _ in range(20):
            found = source.read_many(positions)
            wrong.extend(int(p) for p, data in zip(positions, found, strict=True) if bytes(data) != expected[p])

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_no_handle_is_left_open(folder: Path) -> None:
    source = open_folder(folder)
    os.remove(source.path(3))
    source.read_many(np.arange(40))
    before = len(os.listdir("/proc/self/fd"))
    source.read_many(np.arange(40))
    assert len(os.listdir("/proc/self/fd")) == before
