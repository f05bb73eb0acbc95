"""What DALI is fed: windows, rows, lists, finished pictures."""

from __future__ import annotations

import numpy as np
import pytest

from fastdata.geometry import plan_geometry
from fastdata.transforms import CenterCrop, RandomHorizontalFlip, RandomResizedCrop, Resize, sort_recipe

pytest.importorskip("nvidia.dali", reason="NVIDIA DALI is not installed")

from fastdata.backends._dali_graph import ppm
from fastdata.backends._dali_windows import graph_windows

SIZES = np.random.default_rng(0).integers(1, 3000, (2000, 2))


def windows_of(*transforms: object):  # type: ignore[no-untyped-def]
    geometry = plan_geometry(sort_recipe(transforms), 1, 0, np.arange(2000), SIZES[:, 1], SIZES[:, 0])  # type: ignore[arg-type]
    return geometry, graph_windows(geometry)


def test_a_training_window_is_the_drawn_one_and_all_of_it_is_resized() -> None:
    geometry, window = windows_of(RandomResizedCrop(224), RandomHorizontalFlip())
    assert np.array_equal(window.start, geometry.low)
    assert np.array_equal(window.shape, geometry.high - geometry.low)
    assert not window.region_start.any()
    assert np.allclose(window.region_end, window.shape)
    assert 0.4 < window.mirror.mean() < 0.6


def test_an_evaluation_window_lies_in_the_picture_and_holds_the_region() -> None:
    geometry, window = windows_of(Resize(256), CenterCrop(224))
    assert (window.start >= 0).all()
    assert (window.shape >= 1).all()
    assert (window.start + window.shape <= SIZES).all()
    assert (window.region_start >= -1e-3).all()
    assert (window.region_end <= window.shape + 1e-3).all()
    scale = SIZES / geometry.full
    assert np.allclose(window.region_end - window.region_start, 224 * scale, rtol=1e-4)


def test_an_evaluation_window_leaves_out_what_the_filter_does_not_read() -> None:
    _, window = windows_of(Resize(256), CenterCrop(128))
    large = (SIZES > 600).all(axis=1)
    assert (window.shape[large].prod(axis=1) < 0.4 * SIZES[large].prod(axis=1)).all()


def test_a_ppm_names_width_before_height() -> None:
    assert ppm(np.zeros((2, 5, 3), np.uint8)) == b"P6\n5 2\n255\n" + bytes(30)
