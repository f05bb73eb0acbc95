"""Colour changes of a batch: drawn for each sample on the host, applied to the batch on a GPU.

Formulas are torchvision's (``torchvision.transforms.functional``). On the CPU `fastdata.backends._color_kernel` applies
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from fastdata.backends._transfer import to_device
from fastdata.rng import STREAM_COLOR, keys, uniforms
from fastdata.transforms import ColorJitter, RandomGrayscale, jitter_range

BRIGHTNESS, CONTRAST, SATURATION, HUE, GRAY = range(5)
NOTHING = -1
LUMA = (0.2989, 0.587, 0.114)
"""ITU-R BT.601, as torchvision's rgb_to_grayscale has it."""

_NEUTRAL = np.array([1.0, 1.0, 1.0, 0.0])
"""Factors of the four changes of a jitter that change nothing."""


@dataclass(frozen=True, slots=True)
class ColorPlan:
    """What is done to the colours of n samples, turn by turn."""

    changes: NDArray[np.int64]
    """(n, turns) `BRIGHTNESS` .. `GRAY`, or `NOTHING`."""
    factors: NDArray[np.float32]
    """(n, turns) factors >= 0; of `HUE` the shift, -0.5..0.5 of the colour circle."""


def plan_color(
    transforms: Sequence[ColorJitter | RandomGrayscale], seed: int, epoch: int, ids: NDArray[np.int64]
) -> ColorPlan:
    """Draw the colour changes of samples.

    Args:
        transforms: In order.
        seed: Of draws.
        epoch: The epoch's number.
        ids: (n,) sample ids.
    """
    plans = []
    for place, transform in enumerate(transforms):
        sample_keys = keys(seed, epoch, ids, STREAM_COLOR + place)
        if isinstance(transform, RandomGrayscale):
            plans.append(_plan_gray(transform, sample_keys))
        else:
            plans.append(_plan_jitter(transform, sample_keys))
    changes, factors = (np.concatenate(parts, axis=1) for parts in zip(*plans, strict=True))
    return ColorPlan(changes, factors.astype(np.float32))


def _plan_gray(
    transform: RandomGrayscale, sample_keys: NDArray[np.uint64]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    chosen = uniforms(sample_keys, 1) < transform.p
    return np.where(chosen, GRAY, NOTHING), np.zeros(chosen.shape)


def _plan_jitter(
    transform: ColorJitter, sample_keys: NDArray[np.uint64]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    draws = uniforms(sample_keys, 8)
    order = draws[:, :4].argsort(axis=1)
    lows, highs = np.array(
        [
            jitter_range(transform.brightness, centre=1.0),
            jitter_range(transform.contrast, centre=1.0),
            jitter_range(transform.saturation, centre=1.0),
            jitter_range(transform.hue, centre=0.0),
        ]
    ).T
    factors = np.take_along_axis(lows + (highs - lows) * draws[:, 4:], order, axis=1)
    return np.where(factors == _NEUTRAL[order], NOTHING, order), factors


def color_batch(unit: torch.Tensor, plan: ColorPlan) -> torch.Tensor:
    """Change colours in place.

    Args:
        unit: (n, 3, H, W) float32 in 0..1, on the target device.
        plan: Of the n samples.

    Returns:
        `unit`.
    """
    for turn in range(plan.changes.shape[1]):
        of_turn = plan.changes[:, turn]
        for change in np.unique(of_turn[of_turn != NOTHING]).tolist():
            which = np.flatnonzero(of_turn == change)
            rows = to_device(torch.from_numpy(which), unit.device)
            factors = to_device(torch.from_numpy(plan.factors[which, turn]), unit.device).view(-1, 1, 1, 1)
            unit[rows] = _CHANGES[change](unit[rows], factors)
    return unit


def _luma(unit: torch.Tensor) -> torch.Tensor:
    r, g, b = unit.unbind(1)
    return (LUMA[0] * r + LUMA[1] * g + LUMA[2] * b).unsqueeze(1)


def _brightness(unit: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return (unit * factor).clamp_(0, 1)


def _contrast(unit: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    mean = _luma(unit).mean(dim=(1, 2, 3), keepdim=True)
    return (unit * factor + mean * (1 - factor)).clamp_(0, 1)


def _saturation(unit: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return (unit * factor + _luma(unit) * (1 - factor)).clamp_(0, 1)


def _hue(unit: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """Turn the hue by `shift` of the colour circle (the HSV hexcone, as torchvision's adjust_hue)."""
    high, low = unit.amax(1), unit.amin(1)
    chroma = high - low
    r, g, b = unit.unbind(1)
    safe = torch.where(chroma == 0, torch.ones_like(chroma), chroma)
    sector = torch.where(
        high == r, ((g - b) / safe) % 6, torch.where(high == g, (b - r) / safe + 2, (r - g) / safe + 4)
    )
    turned = (sector / 6 + shift.view(-1, 1, 1)) % 1.0 * 6
    # Each channel as value - chroma * max(0, min(k, 4 - k, 1)), k = (n + sector) mod 6 with n = 5, 3, 1 for R, G, B.
    channels = []
    for n in (5.0, 3.0, 1.0):
        k = (n + turned) % 6
        channels.append(high - chroma * torch.minimum(k, 4 - k).clamp(0, 1))
    return torch.stack(channels, dim=1)


def _gray(unit: torch.Tensor, _factor: torch.Tensor) -> torch.Tensor:
    return _luma(unit).expand_as(unit)


_CHANGES = (_brightness, _contrast, _saturation, _hue, _gray)
