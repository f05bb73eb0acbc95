"""Draws from (seed, epoch, id)."""

from __future__ import annotations

import numpy as np

from fastdata.rng import draw_flips, draw_windows, keys, uniforms
from fastdata.transforms import RandomResizedCrop


def _windows(n: int, width: int, height: int, crop: RandomResizedCrop, epoch: int = 0) -> np.ndarray:
    return draw_windows(0, epoch, np.arange(n), np.full(n, width), np.full(n, height), crop)


def test_a_draw_depends_on_its_own_id_alone() -> None:
    crop = RandomResizedCrop(224)
    ids = np.array([5, 900, 17])
    together = draw_windows(1, 2, ids, np.full(3, 300), np.full(3, 200), crop)
    for row, sample_id in enumerate(ids):
        alone = draw_windows(1, 2, np.array([sample_id]), np.array([300]), np.array([200]), crop)
        assert np.array_equal(alone[0], together[row])
    assert np.array_equal(draw_flips(1, 2, ids, 0.5)[:1], draw_flips(1, 2, ids[:1], 0.5))


def test_the_draws_are_pinned_for_ever() -> None:
    assert keys(7, 3, np.array([0, 1, 123456789]), 2).tolist() == PINNED_KEYS
    assert (
        draw_windows(0, 0, np.arange(3), np.full(3, 500), np.full(3, 375), RandomResizedCrop(224)).tolist()
        == PINNED_WINDOWS
    )


def test_windows_lie_inside_and_keep_scale_and_ratio() -> None:
    crop = RandomResizedCrop(224, scale=(0.2, 0.5), ratio=(0.5, 2.0))
    top, left, h, w = _windows(4000, 400, 300, crop).T
    assert (top >= 0).all()
    assert (left >= 0).all()
    assert (top + h <= 300).all()
    assert (left + w <= 400).all()
    share = h * w / (400 * 300)
    assert share.min() > 0.19
    assert share.max() < 0.51
    assert (w / h).min() > 0.49
    assert (w / h).max() < 2.04


def test_aspect_is_even_on_a_log_scale() -> None:
    """B32: with ratio (0.5, 2) about half of the boxes are wider than tall; with a fixed ratio all have it."""
    _, _, h, w = _windows(500, 400, 400, RandomResizedCrop(224, scale=(0.2, 0.5), ratio=(0.5, 2.0))).T
    assert 200 <= (w > h).sum() <= 300
    _, _, h, w = _windows(500, 400, 400, RandomResizedCrop(224, scale=(0.2, 0.5), ratio=(0.75, 0.75))).T
    assert np.abs(w / h - 0.75).max() <= 0.03


def test_extreme_shapes_take_the_central_window() -> None:
    """B30: a 1000 x 1 picture has no window of the asked aspect; torchvision takes one central column."""
    windows = _windows(1000, 1000, 1, RandomResizedCrop(224))
    assert (windows == [0, 499, 1, 1]).all()
    windows = _windows(1000, 1, 1000, RandomResizedCrop(224))
    assert (windows == [499, 0, 1, 1]).all()
    assert (_windows(10, 1, 1, RandomResizedCrop(224)) == [0, 0, 1, 1]).all()


def test_windows_are_distributed_as_torchvisions() -> None:
    """Means of top, left, height and width over many draws agree with torchvision's within four standard errors."""
    import torch
    from torchvision.transforms import RandomResizedCrop as Reference

    torch.manual_seed(0)
    picture = torch.empty(3, 375, 500)
    theirs = np.array([Reference.get_params(picture, [0.08, 1.0], [3 / 4, 4 / 3]) for _ in range(4000)])
    ours = _windows(4000, 500, 375, RandomResizedCrop(224))
    error = np.sqrt(theirs.var(axis=0) / 4000 + ours.var(axis=0) / 4000)
    assert (np.abs(theirs.mean(axis=0) - ours.mean(axis=0)) < 4 * error).all()


def test_flips_come_with_their_probability() -> None:
    ids = np.arange(20_000)
    for p in (0.0, 0.3, 0.5, 1.0):
        assert abs(draw_flips(3, 1, ids, p).mean() - p) < 0.015


def test_uniforms_are_uniform_and_independent_over_ids_and_counters() -> None:
    numbers = uniforms(keys(0, 0, np.arange(20_000), 2), 4)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert np.abs(numbers.mean(axis=0) - 0.5).max() < 0.01
    assert np.abs(np.corrcoef(numbers.T) - np.eye(4)).max() < 0.03
    assert abs(np.corrcoef(numbers[:-1, 0], numbers[1:, 0])[0, 1]) < 0.03


def test_epochs_draw_anew() -> None:
    crop = RandomResizedCrop(224)
    assert not np.array_equal(_windows(10, 300, 300, crop, 0), _windows(10, 300, 300, crop, 1))


PINNED_KEYS: list[int] = [14056517050891291750, 980013829546072281, 17327252376931798118]
PINNED_WINDOWS: list[list[int]] = [[7, 31, 361, 457], [7, 14, 352, 417], [14, 220, 253, 242]]
