"""Colour changes: drawn per sample, alike on every device, with torchvision's meaning."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torchvision.transforms import functional

from fastdata.backends._color import (
    BRIGHTNESS,
    CONTRAST,
    GRAY,
    HUE,
    NOTHING,
    SATURATION,
    ColorPlan,
    color_batch,
    plan_color,
)
from fastdata.backends._color_kernel import color_picture
from fastdata.backends._finish import BatchFinish
from fastdata.spec import PipelineSpec
from fastdata.transforms import ColorJitter, Normalize, RandomGrayscale, RandomResizedCrop, sort_recipe

SIDE = 24
JITTER = ColorJitter(0.4, 0.5, 0.6, 0.3)


def pictures(count: int) -> torch.Tensor:
    """(n, 24, 24, 3) uint8: noise, with black, white, gray and saturated pixels among it."""
    levels = torch.from_numpy(np.random.default_rng(3).integers(0, 256, (count, SIDE, SIDE, 3), np.uint8))
    for row, color in enumerate([(0, 0, 0), (255, 255, 255), (90, 90, 90), (255, 0, 0), (0, 255, 255), (255, 255, 0)]):
        levels[:, row, :8] = torch.tensor(color, dtype=torch.uint8)
    return levels


def on_host(levels: torch.Tensor, plan: ColorPlan) -> torch.Tensor:
    planes = torch.empty(len(levels), 3, SIDE, SIDE)
    for index in range(len(levels)):
        picture = levels[index].view(-1, 3).numpy()
        color_picture(picture, plan.changes[index], plan.factors[index], planes[index].view(3, -1).numpy())
    return planes


def in_batch(levels: torch.Tensor, plan: ColorPlan) -> torch.Tensor:
    return color_batch(levels.permute(0, 3, 1, 2).float().div_(255), plan).mul_(255)


@pytest.mark.parametrize("apply", [on_host, in_batch])
@pytest.mark.parametrize(
    ("change", "factor", "expected"),
    [
        (BRIGHTNESS, 1.4, functional.adjust_brightness),
        (BRIGHTNESS, 0.0, functional.adjust_brightness),
        (CONTRAST, 0.6, functional.adjust_contrast),
        (CONTRAST, 1.7, functional.adjust_contrast),
        (SATURATION, 0.2, functional.adjust_saturation),
        (SATURATION, 1.6, functional.adjust_saturation),
        (HUE, 0.1, functional.adjust_hue),
        (HUE, -0.5, functional.adjust_hue),
        (GRAY, 0.0, lambda unit, _: functional.rgb_to_grayscale(unit, 3)),
        (NOTHING, 0.3, lambda unit, _: unit),
    ],
)
def test_each_change_is_torchvisions(apply: object, change: int, factor: float, expected: object) -> None:
    levels = pictures(2)
    plan = ColorPlan(np.full((2, 1), change), np.full((2, 1), factor, np.float32))
    wanted = expected(levels.permute(0, 3, 1, 2).float() / 255, factor) * 255  # type: ignore[operator]
    assert torch.allclose(apply(levels, plan), wanted, rtol=0, atol=0.01)  # type: ignore[operator]


def test_host_and_device_give_the_same_colours() -> None:
    levels, ids = pictures(64), np.arange(64)
    plan = plan_color([JITTER, RandomGrayscale(0.3)], 5, 2, ids)
    assert {*plan.changes[:, :4].ravel().tolist()} == {BRIGHTNESS, CONTRAST, SATURATION, HUE}
    assert {*plan.changes[:, 4].tolist()} == {GRAY, NOTHING}
    assert torch.allclose(on_host(levels, plan), in_batch(levels, plan), rtol=0, atol=0.01)


def test_draws_belong_to_the_sample_and_stay_in_range() -> None:
    plan = plan_color([JITTER], 5, 2, np.arange(2000))
    assert (plan.changes[7] == plan_color([JITTER], 5, 2, np.array([7])).changes[0]).all()
    assert (np.sort(plan.changes, axis=1) == range(4)).all()
    for change, low, high in ((BRIGHTNESS, 0.6, 1.4), (CONTRAST, 0.5, 1.5), (SATURATION, 0.4, 1.6), (HUE, -0.3, 0.3)):
        drawn = plan.factors[plan.changes == change]
        assert low <= drawn.min() < low + 0.01 * (high - low)
        assert high >= drawn.max() > high - 0.01 * (high - low)
    first = np.bincount(plan.changes[:, 0], minlength=4)
    assert first.min() > 400  # each change comes first about as often


def test_what_changes_nothing_is_left_out() -> None:
    assert (plan_color([ColorJitter(brightness=0.2)], 0, 0, np.arange(9)).changes >= 0).sum() == 9
    assert (plan_color([ColorJitter()], 0, 0, np.arange(9)).changes == NOTHING).all()


@pytest.mark.parametrize("memory_format", ["channels_last", "contiguous"])
@pytest.mark.parametrize("dtype", ["uint8", "float32", "bfloat16"])
def test_coloured_batches_come_in_the_asked_form(dtype: str, memory_format: str) -> None:
    normalize = () if dtype == "uint8" else (Normalize((0.5, 0.4, 0.3), (0.2, 0.3, 0.4)),)
    recipe = sort_recipe((RandomResizedCrop(SIDE), JITTER, *normalize))
    spec = PipelineSpec(recipe=recipe, batch_size=4, dtype=dtype, memory_format=memory_format, seed=1)  # type: ignore[arg-type]
    levels, ids = pictures(3), np.array([4, 9, 2])
    delivered = BatchFinish(spec)(levels, ids, 1)
    order = torch.channels_last if memory_format == "channels_last" else torch.contiguous_format
    assert delivered.is_contiguous(memory_format=order)
    assert delivered.dtype == getattr(torch, dtype)
    expected = in_batch(levels, plan_color([JITTER], 1, 1, ids))
    if dtype == "uint8":
        assert (delivered.float() - expected).abs().max() <= 0.51
    else:
        mean, std = torch.tensor([0.5, 0.4, 0.3]).view(3, 1, 1), torch.tensor([0.2, 0.3, 0.4]).view(3, 1, 1)
        tolerance = 1e-3 if dtype == "float32" else 0.02
        assert torch.allclose(delivered.float(), (expected / 255 - mean) / std, rtol=0, atol=tolerance)
