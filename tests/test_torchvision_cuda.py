"""The contract with ``decode="cuda"``: here with a host decoder in nvJPEG's place, on a GPU with nvJPEG."""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import fastdata
from fastdata.errors import BackendUnavailableError, FastDataError, UsageError, WorkerError
from fastdata.shards.options import ConvertOptions
from fastdata.testing import PipelineConformance, varied_chroma, write_numbered_folder, write_varied_folder
from tests import pictures
from tests.shard_files import convert_with_damage

pytest.importorskip("triton", reason="Triton is not installed")

from fastdata.backends._gpu_decode import RunAhead, decode_each
from tests.cuda_stand_in import HostDecoder, StandInPipeline

STAND_IN = "tests.cuda_stand_in:StandInPipeline"
INTERPRETED = "tests.cuda_stand_in:InterpretedPipeline"
REPEATING = "tests.cuda_stand_in:RepeatingPipeline"
ON_CUDA = fastdata.TorchvisionOptions(decode="cuda")
TRAIN = (fastdata.RandomResizedCrop(48), fastdata.RandomHorizontalFlip(), fastdata.Normalize())
ON_GPU_LEVELS = {"gray": 0.05, "444": 0.05, "422": 2.5, "420": 6.0}
"""Grey levels by which nvJPEG may differ, in the mean of a picture of `write_varied_folder`, from libjpeg.

Without chroma subsampling there is next to nothing. With it nvJPEG repeats each chroma sample where libjpeg
interpolates, and these small pictures go from any colour to any other within 16 pixels: libjpeg told to repeat differs
from itself by 1.7 (4:2:2) and 4.6 (4:2:0). `test_nvjpeg_differs_from_libjpeg_in_repeated_chroma_alone` sees through
that, and for smooth colours the contract's bound holds: `test_smooth_colours_are_within_a_grey_level_on_the_gpu`.
"""
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU tests check this with nvJPEG")


def crop_ready(folder: Path) -> Path:
    return convert_with_damage(folder, ConvertOptions(crop_ready=True))


def open_pipeline(data: Path, **overrides: Any) -> fastdata.Pipeline:
    arguments: dict[str, Any] = {
        "backend": STAND_IN,
        "transform": TRAIN,
        "batch_size": 8,
        "dtype": "uint8",
        "workers": 2,
        "options": ON_CUDA,
        "shuffle": False,
    }
    return fastdata.open_pipeline(data, **(arguments | overrides))


def epoch(loader: fastdata.Pipeline) -> tuple[list[int], torch.Tensor]:
    batches = list(loader)
    return [i for b in batches for i in b.ids.tolist()], torch.cat([b.images for b in batches]).cpu()


def same_on_the_host(data: Path, **overrides: Any) -> tuple[list[int], torch.Tensor]:
    options = {"backend": "torchvision", "options": None, "device": None}
    with open_pipeline(data, **(overrides | options)) as loader:
        return epoch(loader)


class CudaConformance(PipelineConformance):
    def open(self, data: Path, **overrides: Any) -> fastdata.Pipeline:
        options = {} if "backend" in overrides else {"options": ON_CUDA}  # another backend is the reference
        return super().open(data, **(options | overrides))


@without_gpu
class TestWithAHostDecoder(CudaConformance):
    """All but the kernels and nvJPEG."""

    backend = STAND_IN
    tolerance = 0.05


@without_gpu
class TestWithAHostDecoderOnCropReadyShards(TestWithAHostDecoder):
    def make_data(self, folder: Path) -> Path:
        return crop_ready(folder)


@pytest.mark.gpu
class TestOnTheGpu(CudaConformance):
    backend = "torchvision"
    device: ClassVar[str] = "cuda:0"

    def tolerances(self, ids: list[int]) -> torch.Tensor:
        return torch.tensor([ON_GPU_LEVELS[varied_chroma(sample_id)] for sample_id in ids], dtype=torch.float64)


@pytest.mark.gpu
class TestOnTheGpuWithCropReadyShards(TestOnTheGpu):
    def make_data(self, folder: Path) -> Path:
        return crop_ready(folder)


@pytest.fixture(
    params=[pytest.param("cpu", marks=without_gpu), pytest.param("cuda:0", marks=pytest.mark.gpu)], name="place"
)
def _place(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Where the pipeline runs: on the CPU with stand-ins, or on a GPU."""
    if request.param == "cpu":
        return {"backend": INTERPRETED}
    return {"backend": "torchvision", "device": request.param}


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    """Two classes of pictures of all kinds; `REFUSED` of them must not reach a fast decoder."""
    files = [pictures.oriented(turn) for turn in range(1, 9)]
    files += [pictures.smooth(kind="PNG"), pictures.cmyk(), pictures.gray(90), pictures.smooth(progressive=True)]
    files += [pictures.gray_claiming(1), pictures.gray_claiming(2, progressive=True)]
    files += [pictures.palette(), pictures.sampled("422"), pictures.sampled("440"), pictures.smooth(7, 5)]
    for number, data in enumerate(files):
        path = tmp_path / "odd" / ("a" if number < 8 else "b") / f"{number:02d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return tmp_path / "odd"


REFUSED = {"not a JPEG": 2, "not 1 or 3 components": 1}


@pytest.mark.parametrize("workers", [0, 2])
def test_odd_and_turned_pictures_come_at_their_places(odd: Path, place: dict[str, Any], workers: int) -> None:
    for orientation in ("apply", "ignore"):
        with open_pipeline(odd, **place, workers=workers, orientation=orientation) as loader:
            ids, images = epoch(loader)
            fallbacks = loader.report().fallbacks
        expected_ids, expected = same_on_the_host(odd, orientation=orientation)
        assert ids == expected_ids
        difference = (images.double() - expected.double()).abs().mean(dim=(1, 2, 3))
        if "device" in place:
            # nvJPEG may leave more to the reference, and its chroma differs at the hard edges of such small pictures.
            assert fallbacks.items() >= REFUSED.items()
            assert difference.max() <= 8.0, difference
        else:
            assert fallbacks == REFUSED
            assert difference.max() == 0.0, difference


@without_gpu
@pytest.mark.parametrize("shards", [False, True], ids=["folder", "crop-ready"])
def test_pixels_are_those_of_the_host_path_bit_for_bit(tmp_path: Path, shards: bool) -> None:
    folder = write_varied_folder(tmp_path / "varied")
    data = crop_ready(folder) if shards else folder
    for transform in (TRAIN, (fastdata.Resize(56), fastdata.CenterCrop((48, 40)))):
        with open_pipeline(data, transform=transform, backend=INTERPRETED) as loader:
            ids, images = epoch(loader)
        expected_ids, expected = same_on_the_host(folder, transform=transform)
        assert ids == expected_ids
        assert torch.equal(images, expected)


@pytest.mark.parametrize("shards", [False, True], ids=["folder", "crop-ready"])
def test_gray_files_decode_alike_whatever_sampling_they_claim(
    tmp_path: Path, place: dict[str, Any], shards: bool
) -> None:
    folder = tmp_path / "gray"
    for number in range(12):
        path = folder / "a" / f"{number:02d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(pictures.gray_claiming(number % 3, progressive=number % 4 == 3))
    data = crop_ready(folder) if shards else folder
    expected = same_on_the_host(folder)
    with open_pipeline(data, **place) as loader:
        for _ in range(3):
            loader.set_epoch(0)
            ids, images = epoch(loader)
            assert ids == expected[0]
            difference = (images.double() - expected[1].double()).abs().mean(dim=(1, 2, 3))
            assert difference.max() <= (ON_GPU_LEVELS["gray"] if "device" in place else 0.0), difference


@without_gpu
def test_memory_that_the_decoder_reads_is_not_free_for_reuse(tmp_path: Path) -> None:
    """All memory that workers might take is overwritten before the decoder reads; what it has read, when it is done."""
    folder = write_varied_folder(tmp_path / "varied")
    expected = same_on_the_host(folder)
    with open_pipeline(crop_ready(folder), workers=3, prefetch=3) as loader:
        gpu: Any = loader._gpu  # type: ignore[attr-defined]
        decode, overwritten = gpu._decode, 0

        def hurried(jpegs: list[torch.Tensor]) -> list[torch.Tensor]:
            nonlocal overwritten
            free = []
            with contextlib.suppress(IndexError):
                while True:
                    free.append(gpu._host._memory.popleft())  # not where it is: a worker might take it meanwhile
            for memory in free:
                memory.fill_(0x55)
            gpu._host._memory.extend(free)
            overwritten += len(free)
            return decode(jpegs)

        gpu._decode = hurried
        for _ in range(5):
            loader.set_epoch(0)
            ids, images = epoch(loader)
            assert ids == expected[0]
            assert torch.equal(images, expected[1])
            assert not loader.report().fallbacks  # the reference would hide it
    assert overwritten


@pytest.mark.gpu
@pytest.mark.parametrize("shards", [False, True], ids=["folder", "crop-ready"])
def test_nvjpeg_differs_from_libjpeg_in_repeated_chroma_alone(tmp_path: Path, shards: bool) -> None:
    folder = write_varied_folder(tmp_path / "varied")
    data = crop_ready(folder) if shards else folder
    for transform in (TRAIN, (fastdata.Resize(56), fastdata.CenterCrop(48))):
        with open_pipeline(data, transform=transform, backend="torchvision", device="cuda:0") as loader:
            ids, images = epoch(loader)
        with open_pipeline(folder, transform=transform, backend=REPEATING) as loader:
            expected_ids, expected = epoch(loader)
        assert ids == expected_ids
        difference = (images.double() - expected.double()).abs().mean(dim=(1, 2, 3))
        assert difference.max() <= ON_GPU_LEVELS["444"], difference


@pytest.mark.gpu
def test_smooth_colours_are_within_a_grey_level_on_the_gpu(tmp_path: Path) -> None:
    folder = tmp_path / "smooth"
    (folder / "a").mkdir(parents=True)
    for number, sampling in enumerate(("444", "422", "420", "440") * 2):
        data = pictures.sampled(sampling) if number < 4 else pictures.smooth(progressive=True, subsampling=number % 3)
        (folder / "a" / f"{number}.jpg").write_bytes(data)
    transform = fastdata.Resize((48, 64))
    with open_pipeline(folder, transform=transform, backend="torchvision", device="cuda:0") as loader:
        images = epoch(loader)[1]
    expected = same_on_the_host(folder, transform=transform)[1]
    difference = (images.double() - expected.double()).abs().mean(dim=(1, 2, 3))
    assert difference.max() <= 1.0, difference


@without_gpu
def test_what_the_decoder_fails_on_goes_to_the_reference_and_stays_there(tmp_path: Path) -> None:
    folder = write_varied_folder(tmp_path / "varied")
    bad = {path.read_bytes() for path in (folder / "ant" / "2.jpg", folder / "dog" / "0.jpg")}
    with open_pipeline(folder) as loader:
        decoder = StandInPipeline.decoders[-1]
        decoder.fault = lambda jpeg: "Failed to decode batch: 6" if jpeg in bad else None
        first_ids, first = epoch(loader)
        assert loader.report().fallbacks == {"torchvision's CUDA decoder: Failed to decode batch: 6": 2}
        decoder.calls.clear()
        loader.set_epoch(0)
        second = epoch(loader)
        assert loader.report().fallbacks == {"torchvision's CUDA decoder: Failed to decode batch: 6": 2}
        assert decoder.calls == [7, 8, 7]  # nothing was tried twice
    assert second[0] == first_ids
    assert torch.equal(second[1], first)
    assert torch.equal(first, same_on_the_host(folder)[1])


@without_gpu
def test_what_nothing_can_decode_is_skipped_and_its_batch_goes_on(tmp_path: Path) -> None:
    folder = write_varied_folder(tmp_path / "varied")
    broken = folder / "bee" / "1.jpg"
    data = broken.read_bytes()
    start = pictures.frame_header(data)
    broken.write_bytes(data[: start + 9] + bytes(200) + data[-2:])  # the header stands, what follows is nothing
    with open_pipeline(folder, on_error="skip") as loader:
        ids, images = epoch(loader)
        report = loader.report()
    assert ids == [i for i in range(24) if i != 7]
    assert [(s.sample_id, s.where) for s in report.skipped] == [(7, str(broken))]
    assert torch.equal(images, same_on_the_host(folder, on_error="skip")[1])


@without_gpu
def test_a_picture_of_another_size_than_its_header_says_is_not_read(tmp_path: Path) -> None:
    folder = write_varied_folder(tmp_path / "varied")
    odd_one = (folder / "cat" / "3.jpg").read_bytes()
    with open_pipeline(folder) as loader:
        small = torch.zeros((3, 8, 8), dtype=torch.uint8)
        StandInPipeline.decoders[-1].fault = lambda jpeg: small if jpeg == odd_one else None
        _, images = epoch(loader)
        (reason,) = loader.report().fallbacks
    assert "decoded to (3, 8, 8) instead of (3, " in reason
    assert torch.equal(images, same_on_the_host(folder)[1])


@without_gpu
@pytest.mark.parametrize("workers", [0, 2])
def test_a_failing_device_ends_the_epoch_and_blames_no_picture(tmp_path: Path, workers: int) -> None:
    with open_pipeline(write_numbered_folder(tmp_path / "n", 4), workers=workers) as loader:
        StandInPipeline.decoders[-1].fault = lambda _: "Error while decoding JPEG images: CUDA out of memory."
        with pytest.raises(WorkerError, match="smaller batch size"):
            next(iter(loader))
        StandInPipeline.decoders[-1].fault = lambda _: None
        assert epoch(loader)[0] == list(range(16))


@without_gpu
def test_the_report_says_where_the_time_went(tmp_path: Path) -> None:
    with open_pipeline(write_numbered_folder(tmp_path / "n", 4)) as loader:
        list(loader)
        details = loader.report().details
    assert details["decode"] == "cuda"
    assert details["batches"] == 2
    assert details["prepare_s"] > 0
    assert details["decode_s"] > 0


@pytest.mark.gpu
def test_damage_in_a_scan_harms_no_other_picture(tmp_path: Path) -> None:
    folder = write_varied_folder(tmp_path / "varied")
    path = folder / "bee" / "2.jpg"
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2] + bytes(len(data) // 4) + data[-2:])
    place = {"backend": "torchvision", "device": "cuda:0", "on_error": "skip"}
    with open_pipeline(folder, **place) as loader:
        ids, images = epoch(loader)
        again_ids, _ = epoch(loader)
    expected = same_on_the_host(folder, on_error="skip")
    hosts = dict(zip(*expected, strict=True))
    healthy = [i for i in range(24) if i != 8]
    assert [i for i in ids if i != 8] == [i for i in again_ids if i != 8] == healthy
    for sample_id, picture in zip(ids, images, strict=True):
        if sample_id != 8:
            difference = (picture.double() - hosts[sample_id].double()).abs().mean()
            assert difference <= ON_GPU_LEVELS[varied_chroma(sample_id)], sample_id


@pytest.mark.gpu
@pytest.mark.slow
def test_batches_are_whole_while_the_callers_stream_is_busy(tmp_path: Path) -> None:
    """Memory that moves between streams without waiting shows here: the caller lags behind by many milliseconds."""
    folder = write_varied_folder(tmp_path / "varied")
    place: dict[str, Any] = {"backend": "torchvision", "device": "cuda:0", "batch_size": 4}
    with open_pipeline(folder, **place) as loader:
        expected = dict(zip(*epoch(loader), strict=True))
        load = torch.randn(4096, 4096, device="cuda:0")
        stream = torch.cuda.Stream("cuda:0")
        for _ in range(20):
            sums, ids = [], []
            loader.set_epoch(0)
            with torch.cuda.stream(stream):
                for batch in loader:
                    for _ in range(5):
                        load = torch.nn.functional.normalize(load @ load)
                    sums.append(batch.images.double().sum(dim=(1, 2, 3)))  # read late, freed at once
                    ids += batch.ids.tolist()
                    del batch
            found = torch.cat(sums).cpu().tolist()
            assert found == [expected[i].double().sum().item() for i in ids]


@pytest.mark.gpu
def test_the_first_batch_after_a_break_is_whole(tmp_path: Path) -> None:
    folder = write_varied_folder(tmp_path / "varied")
    with open_pipeline(folder, backend="torchvision", device="cuda:0", batch_size=4) as loader:
        expected = dict(zip(*epoch(loader), strict=True))
        for _ in range(20):
            loader.set_epoch(0)
            for batch in itertools.islice(loader, 2):
                for sample_id, picture in zip(batch.ids.tolist(), batch.images.cpu(), strict=True):
                    assert torch.equal(picture, expected[sample_id])


@pytest.mark.parametrize(
    ("bad", "calls"), [((), [8]), ((5,), [8, 4, 4, 2, 1, 1, 2]), ((0, 1), [8, 4, 2, 1, 1, 2, 4]), (range(8), None)]
)
def test_faults_are_found_by_halving(bad: Any, calls: list[int] | None) -> None:
    jpegs = [torch.full((3,), number, dtype=torch.uint8) for number in range(8)]
    seen = []

    def decode(some: list[torch.Tensor]) -> list[torch.Tensor]:
        seen.append(len(some))
        if any(int(jpeg[0]) in bad for jpeg in some):
            raise RuntimeError("no\nmore")
        return [jpeg * 2 for jpeg in some]

    found, broken = decode_each(decode, jpegs)
    assert broken == {number: "no" for number in bad}
    assert [None if p is None else int(p[0]) for p in found] == [None if i in bad else 2 * i for i in range(8)]
    assert calls is None or seen == calls


def test_an_empty_list_needs_no_decoder() -> None:
    assert decode_each(HostDecoder(), []) == ([], {})


def test_running_ahead_keeps_order_and_bounds_and_raises_last() -> None:
    made: list[int] = []

    def numbers() -> Iterator[Any]:
        for number in range(5):
            made.append(number)
            yield number
        raise WorkerError("a", "b")

    ahead = RunAhead(numbers(), 2)  # type: ignore[arg-type]
    assert next(ahead) == 0
    assert len(made) <= 4
    assert [next(ahead) for _ in range(4)] == [1, 2, 3, 4]
    with pytest.raises(WorkerError):
        next(ahead)
    ahead.close()
    ahead.close()


def test_closing_a_run_ahead_closes_its_generator_and_thread() -> None:
    closed = threading.Event()

    def endless() -> Iterator[Any]:
        try:
            yield from itertools.count()
        finally:
            closed.set()

    ahead = RunAhead(endless(), 2)  # type: ignore[arg-type]
    next(ahead)
    ahead.close()
    assert closed.is_set()
    assert "fastdata-gpu-decode" not in {thread.name for thread in threading.enumerate()}


def keep(picture: torch.Tensor) -> torch.Tensor:
    return picture


def test_what_cannot_be_done_on_a_gpu_is_refused(tmp_path: Path) -> None:
    data = write_numbered_folder(tmp_path / "n", 2)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"backend": "torchvision"}, 'device="cuda:N"'),
        ({"transform": (fastdata.Resize((16, 16)), keep)}, "callable"),
        ({"backend": "pil"}, "HostOptions|options"),
    ]
    for arguments, said in wrong:
        with pytest.raises(UsageError, match=said):
            open_pipeline(data, **arguments)
    with pytest.raises(UsageError, match="processes"):
        fastdata.TorchvisionOptions(pool="processes", decode="cuda")
    with pytest.raises(UsageError, match="decode"):
        fastdata.TorchvisionOptions(decode="gpu")  # type: ignore[arg-type]


@without_gpu
def test_a_missing_gpu_is_said_at_construction(tmp_path: Path) -> None:
    data = write_numbered_folder(tmp_path / "n", 2)
    with pytest.raises(BackendUnavailableError, match=r'no CUDA device here.*decode="host"'):
        open_pipeline(data, backend="torchvision", device="cuda:0")


@without_gpu
def test_a_missing_triton_is_said_at_construction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write_numbered_folder(tmp_path / "n", 2)
    open_pipeline(data).close()
    import fastdata.backends as backends

    monkeypatch.setattr("tests.cuda_stand_in.interpret_kernels", lambda: None)  # it would import Triton first
    monkeypatch.delattr(backends, "_gpu_kernels")
    monkeypatch.delitem(sys.modules, "fastdata.backends._gpu_kernels")
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(FastDataError, match=r"Triton: cannot be imported.*pip install triton"):
        open_pipeline(data)


def test_host_options_still_choose_the_pool_of_the_host_path(tmp_path: Path) -> None:
    data = write_numbered_folder(tmp_path / "n", 2)
    with open_pipeline(data, backend="torchvision", options=fastdata.HostOptions(pool="threads")) as loader:
        assert np.array_equal(epoch(loader)[0], range(8))
        assert loader.report().details["pool"] == "threads"
