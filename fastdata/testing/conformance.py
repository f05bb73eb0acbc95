"""The contract as a test class."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from PIL import Image

import fastdata
from fastdata.batch import Batch
from fastdata.errors import FastDataError, SampleError, SkipBudgetError, StateError, UsageError
from fastdata.registry import load_backend
from fastdata.testing.pictures import corrupt, ids_in_pixels, write_numbered_folder, write_varied_folder
from fastdata.transforms import Transform


class PipelineConformance:
    """What every backend keeps. Subclass it in a test file and set `backend`; override `make_data` for shards."""

    backend: ClassVar[str]
    """As in ``open_pipeline(backend=...)``."""
    device: ClassVar[str] = "cpu"
    """Where batches are asked for."""
    tolerance: ClassVar[float] = 0.05
    """Mean difference of an image from the `pil` backend, in grey levels; see `tolerances`."""
    flat_tolerance: ClassVar[int] = 4
    """Grey levels by which one pixel of a flat picture may be off."""
    worker_counts: ClassVar[tuple[int, ...]] = (0, 1, 3)
    """Numbers of workers that must give the same batches."""

    def make_data(self, folder: Path) -> Path:
        """Return what `open_pipeline` gets for a folder of pictures: the folder itself, or shards made of it."""
        return folder

    def open(self, data: Path, **overrides: Any) -> fastdata.Pipeline:
        """Open a small uint8 pipeline without augmentation."""
        transform: tuple[Transform, ...] = (fastdata.Resize((32, 32)),)
        arguments: dict[str, Any] = {
            "backend": self.backend,
            "transform": transform,
            "batch_size": 8,
            "dtype": "uint8",
            "device": self.device,
            "workers": 2,
        }
        return fastdata.open_pipeline(data, **(arguments | overrides))

    def tolerances(self, ids: list[int]) -> torch.Tensor:
        """Return what each picture of `varied` may differ by, (n,): `tolerance` unless overridden."""
        return torch.full((len(ids),), self.tolerance, dtype=torch.float64)

    @pytest.fixture
    def data(self, tmp_path: Path) -> Path:
        """40 numbered pictures in four classes."""
        return self.make_data(write_numbered_folder(tmp_path / "numbered", 10))

    @pytest.fixture
    def varied(self, tmp_path: Path) -> Path:
        """24 pictures with structure, of different sizes and chroma sampling, three gray."""
        return self.make_data(write_varied_folder(tmp_path / "varied"))

    def test_each_id_comes_once_an_epoch_with_its_pixels_and_label(self, data: Path) -> None:
        with self.open(data) as loader:
            for _ in range(3):
                ids, labels, seen = _collect(loader)
                assert sorted(ids) == list(range(40))
                assert seen == ids
                assert labels == [i // 10 for i in ids]

    def test_len_is_the_number_of_batches(self, data: Path) -> None:
        for batch_size in (1, 7, 8, 40, 64):
            for drop_last in (False, True):
                if drop_last and batch_size > 40:
                    continue
                with self.open(data, batch_size=batch_size, drop_last=drop_last) as loader:
                    assert len(loader) == len(list(loader)) == (40 // batch_size if drop_last else -(-40 // batch_size))

    def test_last_batch_is_partial_or_dropped_never_padded(self, data: Path) -> None:
        with self.open(data, batch_size=16) as loader:
            assert [len(batch) for batch in loader] == [16, 16, 8]
        with self.open(data, batch_size=16, drop_last=True) as loader:
            assert [len(batch) for batch in loader] == [16, 16]

    def test_an_epoch_without_a_full_step_is_refused(self, data: Path) -> None:
        with pytest.raises(UsageError, match="no full step"):
            self.open(data, batch_size=64, drop_last=True)

    def test_order_and_draws_do_not_depend_on_workers(self, varied: Path) -> None:
        runs = []
        for workers in self.worker_counts:
            with self.open(varied, workers=workers, transform=_TRAIN, seed=3) as loader:
                runs.append(_pixels(loader))
        for ids, images in runs[1:]:
            assert ids == runs[0][0]
            assert torch.equal(images, runs[0][1])

    def test_another_epoch_has_another_order_and_other_draws(self, varied: Path) -> None:
        with self.open(varied, transform=_TRAIN) as loader:
            first, second = _pixels(loader), _pixels(loader)
            loader.set_epoch(0)
            again = _pixels(loader)
        assert first[0] != second[0]
        assert not torch.equal(_by_id(*first), _by_id(*second))
        assert again[0] == first[0]
        assert torch.equal(again[1], first[1])

    def test_seeds_differ_and_repeat(self, data: Path) -> None:
        orders = []
        for seed in (1, 1, 2):
            with self.open(data, seed=seed) as loader:
                orders.append(_collect(loader)[0])
        assert orders[0] == orders[1] != orders[2]

    def test_without_shuffle_ids_ascend(self, data: Path) -> None:
        with self.open(data, shuffle=False) as loader:
            assert _collect(loader)[0] == list(range(40))

    def test_same_samples_windows_and_pixels_as_the_reference(self, varied: Path) -> None:
        for transform in (_TRAIN, _EVAL):
            with self.open(varied, transform=transform, seed=5) as loader:
                ids, images = _pixels(loader)
            reference = {"backend": "pil", "device": "cpu"}
            with self.open(varied, transform=transform, seed=5, **reference) as loader:
                expected_ids, expected = _pixels(loader)
            assert ids == expected_ids
            difference = (images.cpu().double() - expected.double()).abs().mean(dim=(1, 2, 3))
            assert (difference <= self.tolerances(ids)).all(), difference

    def test_splits_are_disjoint_equal_in_steps_and_complete(self, data: Path) -> None:
        for world_size in (2, 3, 4, 7):
            for epoch in range(2):
                lengths, ids = set(), []
                for rank in range(world_size):
                    with self.open(data, batch_size=3, rank=rank, world_size=world_size) as loader:
                        loader.set_epoch(epoch)
                        batches = list(loader)
                        lengths.add((len(loader), len(batches)))
                        ids += [i for batch in batches for i in batch.ids.tolist()]
                assert len(lengths) == 1
                assert sorted(ids) == list(range(40))

    def test_dtype_shape_device_and_layout(self, data: Path) -> None:
        for dtype in ("float32", "float16", "bfloat16", "uint8"):
            for memory_format in ("channels_last", "contiguous"):
                options: dict[str, Any] = {"dtype": dtype, "memory_format": memory_format}
                with self.open(data, batch_size=6, transform=_eval(32, 24), **options) as loader:
                    images, labels = next(iter(loader))
                assert images.shape == (6, 3, 32, 24)
                assert images.dtype == getattr(torch, dtype)
                assert images.device == torch.device(self.device)
                expected = torch.channels_last if memory_format == "channels_last" else torch.contiguous_format
                assert images.is_contiguous(memory_format=expected)
                assert labels.shape == (6,)
                assert labels.dtype == torch.int64
                assert labels.device == torch.device(self.device)

    def test_labels_feed_a_loss_without_a_cast(self, data: Path) -> None:
        with self.open(data, batch_size=16, dtype="float32") as loader:
            for images, labels in loader:
                logits = images.mean(dim=(2, 3)) @ torch.ones(3, 4, device=images.device)
                assert torch.nn.functional.cross_entropy(logits, labels).isfinite()

    def test_normalisation_has_the_right_scale_and_channel_order(self, tmp_path: Path) -> None:
        folder = tmp_path / "colors"
        for name, color in (("a", (124, 116, 104)), ("b", (255, 0, 0))):
            (folder / name).mkdir(parents=True)
            Image.new("RGB", (64, 48), color).save(folder / name / "0.jpg", quality=95)
        with self.open(self.make_data(folder), transform=_eval(32, 32), dtype="float32", shuffle=False) as loader:
            images, _ = next(iter(loader))
        means = images.mean(dim=(2, 3)).cpu()
        assert means[0].abs().max() < 0.06
        assert torch.allclose(means[1], torch.tensor([2.25, -2.04, -1.80]), atol=0.07)

    def test_break_and_iterate_again_is_clean(self, data: Path) -> None:
        with self.open(data) as loader:
            for _ in range(5):
                for batch in loader:
                    assert len(batch) == 8
                    break
            assert sorted(_collect(loader)[0]) == list(range(40))

    def test_a_second_iterator_ends_the_first(self, data: Path) -> None:
        with self.open(data) as loader:
            first = iter(loader)
            next(first)
            second = iter(loader)
            assert list(first) == []
            assert len(list(second)) == 5

    def test_close_twice_and_iterate_after_close(self, data: Path) -> None:
        loader = self.open(data)
        next(iter(loader))
        loader.close()
        loader.close()
        with pytest.raises(UsageError, match="after close"):
            iter(loader)

    def test_a_delivered_batch_stays_valid(self, data: Path) -> None:
        with self.open(data, batch_size=4) as loader:
            kept = [batch for _ in range(3) for batch in loader]
        for batch in kept:
            assert ids_in_pixels(batch.images) == batch.ids.tolist()

    def test_state_resumes_in_mid_epoch_in_a_new_process(self, data: Path) -> None:
        with self.open(data, seed=9) as loader:
            loader.set_epoch(4)
            batches = iter(loader)
            done = [i for _ in range(2) for i in next(batches).ids.tolist()]
            state = json.loads(json.dumps(loader.state_dict()))
            rest = [i for batch in batches for i in batch.ids.tolist()]
        script = (
            "import json, sys, fastdata\n"
            "data, backend, device, state = sys.argv[1:]\n"
            "loader = fastdata.open_pipeline(data, backend=backend, device=device, batch_size=5, workers=1, seed=9,\n"
            "    transform=fastdata.Resize((32, 32)), dtype='uint8')\n"
            "loader.load_state_dict(json.loads(state))\n"
            "print(json.dumps([len(loader), [i for batch in loader for i in batch.ids.tolist()]]))\n"
            "loader.close()\n"
        )
        argv = [sys.executable, "-c", script, str(data), self.backend, self.device, json.dumps(state)]
        out = subprocess.run(argv, check=True, capture_output=True, text=True, timeout=120).stdout
        length, resumed = json.loads(out.splitlines()[-1])
        assert resumed == rest
        assert length == -(-len(rest) // 5)
        assert sorted(done + rest) == list(range(40))

    def test_state_resumes_at_another_world_size(self, data: Path) -> None:
        with self.open(data, batch_size=8) as loader:
            batches = iter(loader)
            done = next(batches).ids.tolist()
            state = loader.state_dict()
        rest: list[int] = []
        for rank in range(2):
            with self.open(data, batch_size=4, rank=rank, world_size=2) as loader:
                loader.load_state_dict(state)
                rest += _collect(loader)[0]
        assert sorted(done + rest) == list(range(40))

    def test_a_resumed_epoch_without_another_full_step_has_no_batch_and_the_next_one_follows(self, data: Path) -> None:
        with self.open(data, batch_size=8, drop_last=True) as loader:
            batches = iter(loader)
            for _ in range(4):
                next(batches)
            state = loader.state_dict()
        with self.open(data, batch_size=6, drop_last=True, rank=1, world_size=2) as loader:  # 8 left, 12 a step
            loader.load_state_dict(state)
            assert len(loader) == 0
            assert list(loader) == []
            assert (loader.state_dict()["epoch"], loader.state_dict()["samples"]) == (1, 0)
            assert [len(batch) for batch in loader] == [6, 6, 6]

    def test_state_after_the_last_batch_means_the_next_epoch(self, data: Path) -> None:
        with self.open(data) as loader:
            list(loader)
            state = loader.state_dict()
            assert (state["epoch"], state["samples"]) == (1, 0)
            following = _collect(loader)[0]
            loader.load_state_dict(state)
            assert _collect(loader)[0] == following

    def test_state_of_other_samples_or_seeds_is_refused(self, data: Path) -> None:
        with self.open(data, seed=1) as loader:
            state = loader.state_dict()
        with self.open(data, seed=2) as loader, pytest.raises(StateError, match="seed"):
            loader.load_state_dict(state)

    def test_a_corrupt_file_raises_with_its_path(self, tmp_path: Path) -> None:
        folder = write_numbered_folder(tmp_path / "bad", 5)
        bad = corrupt(folder / "cat" / "0002.jpg")
        with self.open(self.make_data(folder)) as loader:
            with pytest.raises(SampleError) as caught:
                list(loader)
            assert caught.value.sample_id == 12
            assert self.place_of(bad, 12) in str(caught.value)

    def test_corrupt_files_are_skipped_and_counted(self, tmp_path: Path) -> None:
        folder = write_numbered_folder(tmp_path / "bad", 5)
        bad = [corrupt(folder / "ant" / "0001.jpg"), corrupt(folder / "dog" / "0004.jpg")]
        with self.open(self.make_data(folder), on_error="skip", shuffle=False) as loader:
            ids, labels, seen = _collect(loader)
            report = loader.report()
        assert ids == seen == [i for i in range(20) if i not in (1, 19)]
        assert labels == [i // 5 for i in ids]
        assert report.delivered == 18
        assert [skipped.sample_id for skipped in report.skipped] == [1, 19]
        for skipped, path, sample_id in zip(report.skipped, bad, (1, 19), strict=True):
            assert self.place_of(path, sample_id) in skipped.where
            assert skipped.reason

    def test_a_batch_of_which_nothing_is_left_is_not_handed_out(self, tmp_path: Path) -> None:
        folder = write_numbered_folder(tmp_path / "bad", 4)
        for number in range(4):
            corrupt(folder / "bee" / f"{number:04d}.jpg")
        with self.open(self.make_data(folder), on_error="skip", shuffle=False, batch_size=4) as loader:
            assert len(loader) == 4
            assert [batch.ids.tolist()[0] for batch in loader] == [0, 8, 12]
            assert loader.report().empty_batches == 1
        ranks = {"rank": 0, "world_size": 2, "batch_size": 2}
        with (
            self.open(self.make_data(folder), on_error="skip", shuffle=False, **ranks) as loader,
            pytest.warns(RuntimeWarning, match="one batch fewer than the others: nothing of step 1"),
        ):
            assert len(list(loader)) == len(loader) - 1

    def test_the_skip_budget_is_that_of_the_whole_epoch_after_a_resume_too(self, tmp_path: Path) -> None:
        folder = write_numbered_folder(tmp_path / "bad", 8)
        for number in range(6, 8):
            corrupt(folder / "dog" / f"{number:04d}.jpg")
        some = {"on_error": fastdata.Skip(max_fraction=0.1), "shuffle": False, "batch_size": 4}
        with self.open(self.make_data(folder), **some) as loader:
            batches = iter(loader)
            for _ in range(len(loader) - 1):
                next(batches)
            state = loader.state_dict()
        with self.open(self.make_data(folder), **some) as loader:
            loader.load_state_dict(state)
            assert [len(batch) for batch in loader] == [2]

    def test_the_skip_budget_ends_the_epoch(self, tmp_path: Path) -> None:
        folder = write_numbered_folder(tmp_path / "bad", 5)
        for number in range(3):
            corrupt(folder / "bee" / f"{number:04d}.jpg")
        with self.open(self.make_data(folder), on_error=fastdata.Skip(max_fraction=0.1)) as loader:
            with pytest.raises(SkipBudgetError):
                list(loader)

    def test_report_counts_what_was_delivered(self, data: Path) -> None:
        with self.open(data) as loader:
            list(loader)
            report = loader.report()
        assert (report.delivered, report.batches, report.skipped) == (40, 5, [])
        assert 0 <= report.waited_s <= report.total_s

    def test_batch_transform_draws_from_seed_epoch_and_place(self, data: Path) -> None:
        def noisy(images: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return images + torch.rand(images.shape[0], device=images.device).view(-1, 1, 1, 1), labels

        runs = []
        for _ in range(2):
            with self.open(data, dtype="float32", batch_transform=noisy) as loader:
                runs.append(_pixels(loader)[1])
        with self.open(data, dtype="float32") as loader:
            plain = _pixels(loader)[1]
        assert torch.equal(runs[0], runs[1])
        noise = (runs[0] - plain)[:, 0, 0, 0]
        assert len(set(noise.tolist())) > 30

    def test_color_and_erasing_change_each_sample_alike_on_every_backend(self, varied: Path) -> None:
        transform = (
            fastdata.Resize((32, 32)),
            fastdata.ColorJitter(0.4, 0.4, 0.4, 0.1),
            fastdata.RandomGrayscale(0.3),
            fastdata.Normalize(),
            fastdata.RandomErasing(0.5),
        )
        with self.open(varied, transform=transform, dtype="float32") as loader:
            ids, images = _pixels(loader)
        with self.open(varied, transform=transform, dtype="float32", backend="pil", device="cpu") as loader:
            expected_ids, expected = _pixels(loader)
        assert ids == expected_ids
        # One grey level is 1 / 255 / 0.225 = 0.0174 on the normalised scale.
        difference = (images.cpu() - expected).abs().mean(dim=(1, 2, 3))
        assert (difference <= 0.0174 * (1.5 * self.tolerances(ids)).clamp(min=0.01)).all(), difference

    def test_what_cannot_be_honoured_is_refused_at_construction(self, data: Path) -> None:
        wrong: list[tuple[dict[str, Any], str]] = [
            ({"num_workers": 3}, "workers"),
            ({"batch_size": 0}, "batch_size"),
            ({"dtype": "int8"}, "dtype"),
            ({"shuffle": fastdata.BufferShuffle()}, "BufferShuffle"),
            ({"options": object()}, load_backend(self.backend).name),
            ({"prefetch": 0}, "prefetch"),
            ({"on_error": "ignore"}, "on_error"),
            ({"rank": 1}, "world_size"),
            ({"transform": fastdata.RandomHorizontalFlip()}, "size"),
        ]
        for arguments, said in wrong:
            with pytest.raises(FastDataError, match=said):
                self.open(data, **arguments)

    def test_nothing_is_left_behind(self, data: Path) -> None:
        with self.open(data) as loader:  # once before, so that libraries have opened what they keep
            list(loader)
        gc.collect()
        threads, handles = threading.active_count(), _open_handles()
        for _ in range(3):
            loader = self.open(data)
            next(iter(loader))
            loader.close()
            del loader
        gc.collect()
        deadline = time.monotonic() + 10
        while threading.active_count() > threads and time.monotonic() < deadline:
            time.sleep(0.05)
        assert threading.active_count() <= threads
        assert _open_handles() <= handles + 2
        assert not multiprocessing.active_children()

    def test_the_garbage_collector_may_run_in_a_worker_of_a_forgotten_pipeline(
        self, data: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with self.open(data) as loader:
            source_type: Any = type(loader.source)
        read_many = source_type.read_many

        def collect_and_read(source: Any, positions: Any) -> Any:
            gc.collect()
            return read_many(source, positions)

        monkeypatch.setattr(source_type, "read_many", collect_and_read)
        threads = threading.active_count()
        for _ in range(2):
            next(iter(self.open(data)))  # and the pipeline is garbage, with work under way
        deadline = time.monotonic() + 20
        while threading.active_count() > threads and time.monotonic() < deadline:
            gc.collect()
            time.sleep(0.05)
        assert threading.active_count() <= threads

    def place_of(self, path: Path, sample_id: int) -> str:
        """Return what a message must hold for a file of a folder: its path, or for shards the member's key."""
        return str(path) if self.make_data(path.parent.parent) == path.parent.parent else f"{sample_id:09d}"


_TRAIN: tuple[Transform, ...] = (
    fastdata.RandomResizedCrop(48),
    fastdata.RandomHorizontalFlip(),
    fastdata.Normalize(),
)
_EVAL: tuple[Transform, ...] = (fastdata.Resize(56), fastdata.CenterCrop(48), fastdata.Normalize())


def _eval(height: int, width: int) -> tuple[Transform, ...]:
    return (fastdata.Resize((height, width)), fastdata.Normalize())


def _collect(loader: fastdata.Pipeline) -> tuple[list[int], list[int], list[int]]:
    """Return (ids, labels, ids told by the pixels) of an epoch."""
    ids: list[int] = []
    labels: list[int] = []
    seen: list[int] = []
    for batch in loader:
        ids += batch.ids.tolist()
        assert batch.labels is not None
        labels += batch.labels.tolist()
        seen += ids_in_pixels(batch.images)
    return ids, labels, seen


def _pixels(loader: fastdata.Pipeline) -> tuple[list[int], torch.Tensor]:
    batches: list[Batch] = list(loader)
    return [i for b in batches for i in b.ids.tolist()], torch.cat([b.images for b in batches])


def _by_id(ids: list[int], images: torch.Tensor) -> torch.Tensor:
    return images[torch.tensor(ids, device=images.device).argsort()]


def _open_handles() -> int:
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
