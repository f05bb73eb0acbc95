"""The webdataset backend on streams: order, draws, ranks, length, state, skips."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fastdata
from fastdata.batch import Batch
from fastdata.errors import SampleError, ShardError, SkipBudgetError, SourceError, StateError, UsageError
from fastdata.testing import ids_in_pixels, write_varied_folder
from tests.shard_files import convert_with_damage, picture, sample, write_numbered_shards, write_tar

TRAIN = (fastdata.RandomResizedCrop(48), fastdata.RandomHorizontalFlip(), fastdata.Normalize())
BUFFER = fastdata.BufferShuffle(samples=15)


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """40 numbered samples in shards of 7, 3, 12, 8 and 10."""
    return write_numbered_shards(tmp_path / "shards", [7, 3, 12, 8, 10])


def open_stream(data: Any, **overrides: Any) -> fastdata.Pipeline:
    options = fastdata.WebDatasetOptions(**({"stream": True} | overrides.pop("options", {})))
    arguments: dict[str, Any] = {
        "backend": "webdataset",
        "transform": fastdata.Resize((32, 32)),
        "batch_size": 8,
        "dtype": "uint8",
        "workers": 2,
        "shuffle": BUFFER,
    }
    return fastdata.open_pipeline(data, options=options, **(arguments | overrides))


def ids_of(batches: Any) -> list[int]:
    return [i for batch in batches for i in batch.ids.tolist()]


def test_each_sample_comes_once_an_epoch_with_its_pixels_and_label(shards: Path) -> None:
    for shuffle in (False, BUFFER, fastdata.BufferShuffle(1), fastdata.BufferShuffle(1000)):
        with open_stream(shards, shuffle=shuffle) as loader:
            for _ in range(2):
                batches = list(loader)
                ids = ids_of(batches)
                assert sorted(ids) == list(range(40))
                assert [i for batch in batches for i in ids_in_pixels(batch.images)] == ids
                assert [label for batch in batches for label in batch.labels.tolist()] == [i // 10 for i in ids]


def test_without_shuffle_samples_come_as_they_lie(shards: Path) -> None:
    with open_stream(shards, shuffle=False) as loader:
        assert ids_of(loader) == list(range(40))


def test_order_and_pixels_do_not_depend_on_workers_or_pools(tmp_path: Path) -> None:
    data = convert_with_damage(write_varied_folder(tmp_path / "varied"))
    runs: list[list[Batch]] = []
    for workers, pool in ((0, "threads"), (1, "threads"), (3, "threads"), (2, "processes")):
        with open_stream(data, workers=workers, transform=TRAIN, options={"pool": pool}) as loader:
            runs.append(list(loader))
    for run in runs[1:]:
        assert ids_of(run) == ids_of(runs[0])
        assert all(torch.equal(a.images, b.images) for a, b in zip(run, runs[0], strict=True))


def test_a_sample_gets_the_same_crop_from_a_stream_as_from_the_index(tmp_path: Path) -> None:
    data = convert_with_damage(write_varied_folder(tmp_path / "varied"))
    pixels: list[dict[int, torch.Tensor]] = []
    for options, shuffle in (({}, BUFFER), ({"stream": False}, True)):
        with open_stream(data, options=options, shuffle=shuffle, transform=TRAIN, seed=4) as loader:
            loader.set_epoch(3)
            pixels.append(
                {i: image for batch in loader for i, image in zip(batch.ids.tolist(), batch.images, strict=True)}
            )
    assert pixels[0].keys() == pixels[1].keys()
    assert all(torch.equal(pixels[0][i], pixels[1][i]) for i in pixels[0])


def test_epochs_and_seeds_differ_and_repeat(shards: Path) -> None:
    orders = []
    for seed in (1, 1, 2):
        with open_stream(shards, seed=seed) as loader:
            orders.append([ids_of(loader), ids_of(loader)])
    assert orders[0] == orders[1]
    assert orders[0][0] != orders[0][1] != orders[2][1] != orders[2][0] != orders[0][0]


def test_a_buffer_of_everything_breaks_up_class_sorted_shards(tmp_path: Path) -> None:
    for shard in range(20):
        members = [
            m
            for n in range(5)
            for m in (*[(f"s{shard}-{n}.jpg", picture(shard)), (f"s{shard}-{n}.cls", b"%d" % shard)],)
        ]
        write_tar(tmp_path / f"{shard:02d}.tar", members)
    with open_stream(tmp_path, shuffle=fastdata.BufferShuffle(100)) as loader:
        epochs = [[label for batch in loader for label in batch.labels.tolist()] for _ in range(3)]
    for labels in epochs:
        assert max(len(list(run)) for _, run in itertools.groupby(labels)) < 5
    assert epochs[0] != epochs[1] != epochs[2]


def test_the_last_batch_is_partial_or_dropped(shards: Path) -> None:
    with open_stream(shards, batch_size=16) as loader:
        assert [len(batch) for batch in loader] == [16, 16, 8]
    with open_stream(shards, batch_size=16, drop_last=True) as loader:
        assert [len(batch) for batch in loader] == [16, 16]
    with open_stream(shards, batch_size=64, drop_last=True) as loader, pytest.raises(SourceError, match="no full step"):
        list(loader)
    with pytest.raises(UsageError, match="no full step"):
        open_stream(shards, batch_size=64, drop_last=True, options={"length": 40})


def test_len_is_a_type_error_unless_the_length_is_given(shards: Path) -> None:
    with open_stream(shards) as loader:
        with pytest.raises(TypeError, match="length="):
            len(loader)
        assert len(list(loader)) == 5
    for drop_last, steps in ((False, 4), (True, 3)):
        with open_stream(shards, batch_size=12, drop_last=drop_last, options={"length": 40}) as loader:
            assert len(loader) == steps == len(list(loader))


@pytest.mark.parametrize("length", [39, 41])
def test_a_wrong_length_is_an_error_with_both_numbers(shards: Path, length: int) -> None:
    with open_stream(shards, options={"length": length}) as loader, pytest.raises(SourceError, match=f"{length}"):
        list(loader)


def test_shuffles_that_need_an_index_are_refused(shards: Path) -> None:
    for shuffle in (True, fastdata.BlockShuffle()):
        with pytest.raises(UsageError, match="BufferShuffle"):
            open_stream(shards, shuffle=shuffle)
    with pytest.raises(UsageError, match="BufferShuffle"):
        open_stream(shards, options={"stream": False})


def test_stream_options_on_indexed_shards_are_refused(shards: Path) -> None:
    for options in ({"length": 40}, {"split": "samples"}):
        with pytest.raises(UsageError, match="stream=True"):
            open_stream(shards, shuffle=True, options={"stream": False, **options})


def test_state_between_epochs_continues_and_in_mid_epoch_is_refused_with_the_reason(shards: Path) -> None:
    with open_stream(shards, seed=5) as loader:
        assert loader.state_dict()["samples"] == 0
        batches = iter(loader)
        next(batches)
        with pytest.raises(StateError, match="middle of a stream"):
            loader.state_dict()
        for _ in batches:
            pass
        state = loader.state_dict()
        assert (state["epoch"], state["samples"]) == (1, 0)
        following = ids_of(loader)
    with open_stream(shards, seed=5) as loader:
        with pytest.raises(StateError, match="samples"):
            loader.load_state_dict(state | {"samples": 8})
        loader.load_state_dict(state)
        assert ids_of(loader) == following


def test_state_with_the_last_batch_in_hand_means_the_next_epoch(shards: Path) -> None:
    with open_stream(shards) as loader:
        batches = iter(loader)
        for _ in range(5):
            next(batches)
        assert loader.state_dict()["epoch"] == 1


def test_state_of_an_indexed_source_is_refused(shards: Path) -> None:
    with open_stream(shards, options={"stream": False}, shuffle=False) as loader:
        state = loader.state_dict()
    with open_stream(shards, shuffle=False) as loader, pytest.raises(StateError):
        loader.load_state_dict(state)


def test_ranks_that_share_samples_make_equal_steps_and_give_each_id_once(shards: Path) -> None:
    for world_size in (2, 3, 7):
        for length in (None, 40):
            lengths, ids = set(), []
            for rank in range(world_size):
                options = {"split": "samples", "length": length}
                with open_stream(shards, rank=rank, world_size=world_size, batch_size=3, options=options) as loader:
                    batches = list(loader)
                lengths.add(len(batches))
                ids += ids_of(batches)
            assert len(lengths) == 1
            assert sorted(ids) == list(range(40))


def test_ranks_with_own_shards_make_equal_steps_and_repeat_only_what_is_short(shards: Path) -> None:
    for epoch in range(3):
        lengths, ids, repeated = [], [], 0
        for rank in range(2):
            with open_stream(shards, rank=rank, world_size=2, batch_size=4, options={"length": 40}) as loader:
                loader.set_epoch(epoch)
                batches = list(loader)
                lengths += [len(loader), len(batches)]
                repeated += loader.report().details["repeated"]
            ids.append(ids_of(batches))
        assert set(lengths) == {5}
        assert not set(ids[0]) & set(ids[1])
        assert len(ids[0]) == len(ids[1]) == 20
        assert repeated == 40 - len(set(ids[0] + ids[1]))


def test_own_shards_of_equal_size_give_each_id_once(tmp_path: Path) -> None:
    data = write_numbered_shards(tmp_path, [10] * 4)
    ids: list[int] = []
    for rank in range(2):
        options = {"length": 40}
        with open_stream(data, rank=rank, world_size=2, shuffle=fastdata.BufferShuffle(500), options=options) as loader:
            ids += ids_of(loader)
            assert loader.report().details["repeated"] == 0
    assert sorted(ids) == list(range(40))


def test_ranks_that_cannot_be_served_are_refused_before_reading(shards: Path) -> None:
    with pytest.raises(UsageError, match="length="):
        open_stream(shards, rank=0, world_size=2)
    with pytest.raises(UsageError, match=r"5 shards for 6 ranks.*4 a rank"):
        open_stream(shards, rank=0, world_size=6, options={"length": 40})


def test_bad_samples_and_shards_raise_with_their_place(tmp_path: Path, shards: Path) -> None:
    write_tar(tmp_path / "a.tar", [*sample(1), ("000000002.jpg", b"<html>"), ("000000002.cls", b"0")])
    with open_stream(tmp_path / "a.tar") as loader, pytest.raises(SampleError, match=r"a\.tar member 000000002\.jpg"):
        list(loader)
    cut = shards / "shard-000002.tar"
    cut.write_bytes(cut.read_bytes()[:5000])
    with open_stream(shards) as loader, pytest.raises(ShardError, match=r"shard-000002\.tar"):
        list(loader)


def test_bad_samples_and_shards_are_skipped_and_reported(tmp_path: Path) -> None:
    folder = write_numbered_shards(tmp_path, [10, 10, 10])
    write_tar(
        folder / "shard-000001.tar",
        [*sample(10), ("000000011.jpg", b"<html>"), ("000000011.cls", b"1"), *sample(12)[:1]],
    )
    cut = folder / "shard-000002.tar"
    cut.write_bytes(cut.read_bytes()[: 512 * 3 * 2])
    for shuffle in (False, BUFFER):
        with open_stream(folder, on_error="skip", shuffle=shuffle) as loader:
            assert sorted(ids_of(loader))[:11] == list(range(11))
            report = loader.report()
        skipped = {(item.sample_id, Path(item.where.partition(" ")[0]).name) for item in report.skipped}
        assert skipped == {(11, "shard-000001.tar"), (12, "shard-000001.tar"), (-1, "shard-000002.tar")}
        assert all(item.reason for item in report.skipped)


def test_lost_samples_leave_steps_empty_but_the_length_as_it_was(tmp_path: Path) -> None:
    folder = write_numbered_shards(tmp_path, [10, 10])
    (folder / "shard-000001.tar").write_bytes(b"")
    with open_stream(folder, on_error="skip", batch_size=5, shuffle=False, options={"length": 20}) as loader:
        assert len(list(loader)) == 2
        assert len(loader) == 4
        assert loader.report().empty_batches == 2
        assert ids_of(loader) == list(range(10))


def test_one_rank_reports_a_lost_shard_that_all_read(tmp_path: Path) -> None:
    folder = write_numbered_shards(tmp_path, [10, 10, 10])
    (folder / "shard-000001.tar").write_bytes(b"")
    reported = []
    for rank in range(2):
        options = {"split": "samples"}
        with open_stream(folder, rank=rank, world_size=2, on_error="skip", options=options) as loader:
            list(loader)
            reported.append(len(loader.report().skipped))
    assert reported == [0, 1]


def test_a_stream_without_a_sample_is_an_error_that_says_why(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(b"")
    with open_stream(tmp_path, on_error="skip") as loader, pytest.raises(SourceError, match="empty file"):
        list(loader)


def test_the_skip_budget_ends_the_epoch(tmp_path: Path) -> None:
    members = [m for n in range(100) for m in (sample(n) if n % 2 else sample(n)[:1])]
    write_tar(tmp_path / "a.tar", members)
    with open_stream(tmp_path, on_error=fastdata.Skip(0.01)) as loader, pytest.raises(SkipBudgetError):
        list(loader)


def test_streams_without_labels_give_none(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [(f"{n}.jpg", picture(n)) for n in range(9)])
    with open_stream(tmp_path, labels=None) as loader:
        assert all(batch.labels is None for batch in loader)


def test_break_iterate_again_and_close_leave_nothing_behind(shards: Path) -> None:
    with open_stream(shards) as loader:
        list(loader)
    threads, handles = threading.active_count(), len(os.listdir("/proc/self/fd"))
    with open_stream(shards) as loader:
        for _ in range(3):
            for _ in loader:
                break
        first = iter(loader)
        next(first)
        assert sorted(ids_of(loader)) == list(range(40))
        assert list(first) == []
        next(iter(loader))
    deadline = time.monotonic() + 5
    while threading.active_count() > threads and time.monotonic() < deadline:
        time.sleep(0.02)
    assert threading.active_count() <= threads
    assert len(os.listdir("/proc/self/fd")) <= handles
    assert not multiprocessing.active_children()


def test_user_callables_draw_by_sample_in_processes(shards: Path) -> None:
    with open_stream(shards, transform=(fastdata.Resize((32, 32)), shifted)) as loader:
        first = {i: image for batch in loader for i, image in zip(batch.ids.tolist(), batch.images, strict=True)}
        loader.set_epoch(0)
        again = {i: image for batch in loader for i, image in zip(batch.ids.tolist(), batch.images, strict=True)}
    assert all(torch.equal(first[i], again[i]) for i in range(40))


def shifted(image: torch.Tensor) -> torch.Tensor:
    return image + int(np.random.randint(5))
