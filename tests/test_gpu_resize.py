"""The GPU's resize against the CPU's: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import fastdata
from fastdata.backends._finish import BatchFinish
from fastdata.decode import orient, stored_windows
from fastdata.geometry import Geometry, needed_windows
from fastdata.resample import Axis, resample_into
from fastdata.spec import PipelineSpec
from fastdata.transforms import sort_recipe

pytest.importorskip("triton", reason="Triton is not installed")

from fastdata.backends._gpu_resize import GpuResize, describe_decoded, describe_finished
from tests.cuda_stand_in import interpret_kernels

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda:0" if ON_GPU else "cpu"
HEIGHT, WIDTH = 24, 40


@pytest.fixture(autouse=True)
def kernels() -> None:
    if not ON_GPU:
        interpret_kernels()


def spec_of(**overrides: Any) -> PipelineSpec:
    recipe = sort_recipe((fastdata.RandomResizedCrop((HEIGHT, WIDTH)), fastdata.Normalize()))
    return PipelineSpec(**({"recipe": recipe, "batch_size": 8, "device": DEVICE, "dtype": "uint8"} | overrides))


@dataclass
class Case:
    """One picture, what is wanted of it, and what the CPU makes of it."""

    stored: NDArray[np.uint8]
    turn: int
    geometry: Geometry
    margin: int = 2

    def expected(self) -> NDArray[np.uint8]:
        out = np.empty((HEIGHT, WIDTH, 3), np.uint8)
        g = self.geometry
        low, high, full, offset = (a[0].tolist() for a in (g.low, g.high, g.full, g.offset))
        rows = Axis(low[0], high[0], full[0], offset[0], HEIGHT)
        columns = Axis(low[1], high[1], full[1], offset[1], WIDTH)
        resample_into(orient(self.stored, max(1, self.turn)), (0, 0), rows, columns, out, flip=bool(g.flips[0]))
        return out

    def put_on_device(self) -> tuple[torch.Tensor, NDArray[np.int64]]:
        """Return what a decoder gives of the part that is needed, and a margin, and its description."""
        height, width = self.stored.shape[:2]
        turns, widths, heights = np.array([self.turn]), np.array([width]), np.array([height])
        top, left, rows, columns = stored_windows(needed_windows(self.geometry), turns, widths, heights)[0].tolist()
        bottom, right = min(height, top + rows + self.margin), min(width, left + columns + self.margin)
        top, left = max(0, top - self.margin), max(0, left - self.margin)
        part = self.stored[top:bottom, left:right].transpose(2, 0, 1)
        decoded = torch.from_numpy(np.ascontiguousarray(part)).to(DEVICE)
        boxes = np.array([[top, left, bottom - top, right - left]])
        record = describe_decoded(self.geometry, boxes, turns, widths, heights)
        record[:, 0] += decoded.data_ptr()
        return decoded, record


def resized(cases: list[Case]) -> NDArray[np.uint8]:
    placed = [case.put_on_device() for case in cases]
    images, _ = GpuResize(spec_of(), finish=True)(np.concatenate([record for _, record in placed]))
    return images.permute(0, 2, 3, 1).cpu().numpy()


def window(low: tuple[int, int], high: tuple[int, int], *, flip: bool = False) -> Geometry:
    """Return the geometry of a training crop."""
    full = np.array([[HEIGHT, WIDTH]])
    return Geometry(
        np.array([low]), np.array([high]), full, np.zeros((1, 2), np.int64), (HEIGHT, WIDTH), np.array([flip])
    )


def centre(size: tuple[int, int], full: tuple[int, int], offset: tuple[int, int], *, flip: bool = False) -> Geometry:
    """Return the geometry of a resize of the whole picture, of which a part is wanted."""
    zeros = np.zeros((1, 2), np.int64)
    return Geometry(zeros, np.array([size]), np.array([full]), np.array([offset]), (HEIGHT, WIDTH), np.array([flip]))


def noise(height: int, width: int) -> NDArray[np.uint8]:
    return np.random.default_rng((height, width)).integers(0, 256, (height, width, 3), dtype=np.uint8)


@pytest.mark.parametrize("turn", range(9))
def test_turned_crops_equal_the_cpus_integer_for_integer(turn: int) -> None:
    stored = noise(90, 70)
    height, width = (70, 90) if turn >= 5 else (90, 70)
    cases = [
        Case(stored, turn, window((0, 0), (height, width), flip=True)),
        Case(stored, turn, window((11, 7), (52, 66))),
        Case(stored, turn, window((height - 9, width - 13), (height, width), flip=True)),
        Case(stored, turn, centre((height, width), (HEIGHT + 6, WIDTH + 9), (3, 4)), margin=0),
    ]
    found = resized(cases)
    for number, case in enumerate(cases):
        assert np.array_equal(found[number], case.expected()), number


@pytest.mark.parametrize(
    "size", [(1, 1), (1, 200), (200, 1), (2, 3), (24, 40), (400, 30), (30, 400), (48, 80), (333, 217)]
)
def test_any_size_equals_the_cpus_integer_for_integer(size: tuple[int, int]) -> None:
    """Enlarged, reduced, and reduced so much more in height that Pillow's passes change places."""
    case = Case(noise(*size), 1, window((0, 0), size))
    assert np.array_equal(resized([case])[0], case.expected())


def test_finished_pictures_pass_unchanged() -> None:
    pictures = noise(3 * HEIGHT, WIDTH).reshape(3, HEIGHT, WIDTH, 3)
    on_device = torch.from_numpy(pictures).to(DEVICE)
    records = describe_finished(3, (HEIGHT, WIDTH))
    records[:, 0] += on_device.data_ptr()
    images, _ = GpuResize(spec_of(), finish=True)(records[::-1].copy())
    assert np.array_equal(images.permute(0, 2, 3, 1).cpu().numpy(), pictures[::-1])


@pytest.mark.parametrize("memory_format", ["channels_last", "contiguous"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_final_form_is_that_of_every_backend(dtype: str, memory_format: str) -> None:
    spec = spec_of(dtype=dtype, memory_format=memory_format)
    case = Case(noise(60, 80), 1, window((3, 5), (50, 77)))
    decoded, record = case.put_on_device()
    found, _ = GpuResize(spec, finish=True)(record)
    expected = BatchFinish(spec)(torch.from_numpy(case.expected())[None].to(DEVICE), np.zeros(1, np.int64), 0)
    layout = torch.channels_last if memory_format == "channels_last" else torch.contiguous_format
    assert found.is_contiguous(memory_format=layout)
    assert found.dtype == expected.dtype == getattr(torch, dtype)
    torch.testing.assert_close(found, expected, rtol=2e-6 if dtype == "float32" else 1e-2, atol=2e-6)
    del decoded


def test_what_is_not_final_is_uint8_for_the_device_stage() -> None:
    case = Case(noise(60, 80), 1, window((3, 5), (50, 77)))
    decoded, record = case.put_on_device()
    found, _ = GpuResize(spec_of(dtype="float16", memory_format="contiguous"), finish=False)(record)
    assert found.dtype == torch.uint8
    assert np.array_equal(found.permute(0, 2, 3, 1)[0].cpu().numpy(), case.expected())
    del decoded
