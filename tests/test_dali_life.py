"""The life of a "dali" pipeline: several pipelines, early ends, threads, memory, options, losses."""

from __future__ import annotations

import gc
import io
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import fastdata
from fastdata.errors import UsageError, WorkerError
from fastdata.testing import ids_in_pixels, write_numbered_folder
from tests.dali_pipelines import check_pixels, open_dali

pytest.importorskip("nvidia.dali", reason="NVIDIA DALI is not installed")

DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]


@pytest.fixture
def numbered(tmp_path: Path) -> Path:
    return write_numbered_folder(tmp_path / "numbered", 10)


@pytest.mark.parametrize("device", DEVICES)
def test_training_and_validation_pipelines_run_side_by_side(numbered: Path, device: str) -> None:
    with open_dali(numbered, device=device) as train, open_dali(numbered, device=device, shuffle=False) as val:
        for _ in range(2):
            seen: list[int] = []
            for batch in train:
                seen += check_pixels(batch)
                check_pixels(next(iter(val)))
            assert sorted(seen) == list(range(40))
            assert [i for batch in val for i in check_pixels(batch)] == list(range(40))


@pytest.mark.parametrize("device", DEVICES)
def test_no_thread_outlives_close_nor_a_forgotten_pipeline(numbered: Path, device: str) -> None:
    before = threading.active_count()
    native = len(os.listdir("/proc/self/task"))
    loader = open_dali(numbered, device=device)
    next(iter(loader))
    loader.close()
    forgotten = open_dali(numbered, device=device)
    next(iter(forgotten))
    del forgotten
    gc.collect()
    deadline = time.monotonic() + 5
    while len(os.listdir("/proc/self/task")) > native + 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert threading.active_count() <= before
    if device == "cpu":  # on a GPU the driver keeps threads of its own
        assert len(os.listdir("/proc/self/task")) <= native + 2


@pytest.mark.parametrize("device", DEVICES)
def test_memory_does_not_grow_over_twenty_epochs(tmp_path: Path, device: str) -> None:
    root = write_numbered_folder(tmp_path / "many", 50, size=(320, 240))  # 5.5 MB a batch, decoded and delivered
    with open_dali(root, device=device, transform=fastdata.imagenet_train(96), batch_size=32) as loader:
        marks = []
        for epoch in range(20):
            for batch in loader:
                batch.images.sum()
            if epoch in (4, 19):
                gc.collect()
                marks.append((resident_mb(), torch.cuda.memory_reserved() / 2**20 if device != "cpu" else 0.0))
    # The C library's arenas go on filling up for some epochs and then stay; a leak of one batch an epoch would show.
    assert marks[1][0] <= 1.05 * marks[0][0] + 30
    assert marks[1][1] <= marks[0][1] + 100


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def test_the_next_epoch_starts_while_this_one_ends_and_another_choice_is_honoured(numbered: Path) -> None:
    with open_dali(numbered, seed=4) as plain:
        orders = [[i for batch in plain for i in check_pixels(batch)] for _ in range(3)]
    with open_dali(numbered, seed=4) as loader:
        for epoch in (0, 1, 1, 0, 2):  # as counted up, repeated, back, and ahead
            loader.set_epoch(epoch)
            assert [i for batch in loader for i in check_pixels(batch)] == orders[epoch]
        state = loader.state_dict()
        assert (state["epoch"], state["samples"]) == (3, 0)
        loader.load_state_dict(state | {"epoch": 1, "samples": 16})
        assert [i for batch in loader for i in check_pixels(batch)] == orders[1][16:]


def test_what_fails_ahead_is_raised_in_its_own_epoch(numbered: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fastdata.backends._dali_feed import FeedMaker

    honest = FeedMaker.make

    def failing(maker: FeedMaker, step: Any) -> Any:
        if step.epoch == 1:
            raise WorkerError("test", "fails in epoch 1")
        return honest(maker, step)

    monkeypatch.setattr(FeedMaker, "make", failing)
    with open_dali(numbered) as loader:
        assert sum(len(batch) for batch in loader) == 40
        with pytest.raises(WorkerError, match="fails in epoch 1"):
            next(iter(loader))
        assert sum(len(batch) for batch in loader) == 40


def test_kept_batches_stay_valid_while_others_come(numbered: Path) -> None:
    with open_dali(numbered, batch_size=4) as loader:
        kept = [batch for _ in range(4) for batch in loader]
    gc.collect()
    for batch in kept:
        check_pixels(batch)


def test_one_large_file_in_a_batch_of_small_ones_is_fed_as_a_list(numbered: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (1500, 1500, 3), dtype=np.uint8)
    Image.fromarray(noise).save(numbered / "bee" / "0004.jpg", quality=95)
    with open_dali(numbered, batch_size=40, shuffle=False) as loader:
        ids = ids_in_pixels(next(iter(loader)).images)
    assert [i for i in ids if i != ids[14]] == [i for i in range(40) if i != 14]


def test_rows_and_lists_give_the_same_pixels(numbered: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fastdata.backends._dali_feed as feed

    rows = _images(numbered)
    monkeypatch.setattr(feed, "_PADDING_LIMIT", 0)
    monkeypatch.setattr(feed, "_SMALL_BYTES", 0)
    assert torch.equal(rows, _images(numbered))


def _images(root: Path) -> torch.Tensor:
    with open_dali(root, shuffle=False) as loader:
        return torch.cat([batch.images for batch in loader])


def test_fallbacks_are_counted_by_reason_each_epoch(numbered: Path) -> None:
    for number in range(3):
        out = io.BytesIO()
        Image.new("CMYK", (64, 48), (0, 255, 255, 0)).save(out, "JPEG", quality=95)
        (numbered / "cat" / f"000{number}.jpg").write_bytes(out.getvalue())
    with open_dali(numbered) as loader:
        for _ in range(2):
            assert sum(len(batch) for batch in loader) == 40
            assert dict(loader.report().fallbacks) == {"not 1 or 3 components": 3}


def test_options_of_another_backend_and_callables_are_refused(numbered: Path) -> None:
    with pytest.raises(UsageError, match="DaliOptions"):
        open_dali(numbered, options=fastdata.HostOptions())
    with pytest.raises(UsageError, match="host backend"):
        open_dali(numbered, transform=(fastdata.Resize((8, 8)), lambda picture: picture))


def test_no_workers_are_refused_with_what_to_use(numbered: Path) -> None:
    with pytest.raises(UsageError, match=r'never decodes in the calling thread.*workers=1.*backend="pil"'):
        open_dali(numbered, workers=0)


@pytest.mark.parametrize(
    ("workers", "options", "decode_threads", "read_threads"),
    [
        (3, fastdata.DaliOptions(), 3, 2),
        (16, fastdata.DaliOptions(decode_threads=1, read_threads=3), 1, 3),
    ],
)
def test_the_report_tells_the_threads_that_run(
    numbered: Path, workers: int, options: fastdata.DaliOptions, decode_threads: int, read_threads: int
) -> None:
    with open_dali(numbered, workers=workers, options=options) as loader:
        next(iter(loader))
        details = loader.report().details
    assert (details["decode_threads"], details["read_threads"]) == (decode_threads, read_threads)


@pytest.mark.gpu
def test_beside_a_gpu_at_most_four_threads_decode(numbered: Path) -> None:
    with open_dali(numbered, workers=16, device="cuda:0") as loader:
        next(iter(loader))
        assert loader.report().details["decode_threads"] == 4


@pytest.mark.parametrize(
    "wrong",
    [
        {"decode_threads": 0},
        {"hw_decoder_load": 1.5},
        {"queue_depth": 0},
        {"chroma": "nice"},
        {"preallocate_size": (-1, 0)},
    ],
)
def test_impossible_options_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="DaliOptions"):
        fastdata.DaliOptions(**wrong)


@pytest.mark.parametrize(
    "options",
    [fastdata.DaliOptions(queue_depth=1, read_threads=1), fastdata.DaliOptions(queue_depth=5, region_decode=False)],
)
def test_options_change_no_number(numbered: Path, options: fastdata.DaliOptions) -> None:
    with open_dali(numbered, shuffle=False, options=options) as loader:
        found = torch.cat([batch.images for batch in loader])
    assert torch.equal(found, _images(numbered))


@pytest.mark.parametrize("device", DEVICES)
def test_a_small_model_trains_to_the_same_losses_as_on_the_pil_backend(tmp_path: Path, device: str) -> None:
    root = tmp_path / "textures"
    rng = np.random.default_rng(0)
    for label, name in enumerate(("coarse", "fine")):
        (root / name).mkdir(parents=True)
        for number in range(32):
            cells = rng.integers(0, 256, (6 + 18 * label, 6 + 18 * label, 3), dtype=np.uint8)
            picture = Image.fromarray(cells).resize((120, 100), Image.Resampling.BICUBIC)
            picture.save(root / name / f"{number}.jpg", quality=92)
    losses = {backend: train_losses(root, backend, device) for backend in ("pil", "dali")}
    assert losses["pil"][-1] < 0.7 * losses["pil"][0]
    assert np.allclose(losses["pil"], losses["dali"], rtol=0.02, atol=0.01)


def train_losses(root: Path, backend: str, device: str) -> list[float]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, stride=2), torch.nn.ReLU(), torch.nn.Conv2d(8, 8, 3, stride=2), torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(8, 2),
    ).to(device)  # fmt: skip
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    with fastdata.open_pipeline(
        root, backend=backend, transform=fastdata.imagenet_train(48), batch_size=16, device=device, workers=2, seed=1
    ) as loader:
        for _ in range(8):
            total = 0.0
            for images, labels in loader:
                loss = torch.nn.functional.cross_entropy(model(images), labels)
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                total += loss.item() / len(loader)
            losses.append(total)
    return losses
