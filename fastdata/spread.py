"""How sure a figure is: medians and bootstrap intervals over repeats."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

RESAMPLES = 10_000
CONFIDENCE = 0.95
_SEED = 20_240


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % bootstrap interval (percentile method) of the median, or None for fewer than two values."""
    if len(values) < 2:
        return None
    return _interval(_resampled_medians(values, _SEED))


def ratio_interval(before: Sequence[float], after: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % bootstrap interval of median(after) / median(before), or None for fewer than two values each."""
    if min(len(before), len(after)) < 2:
        return None
    return _interval(_resampled_medians(after, _SEED + 1) / _resampled_medians(before, _SEED))


def spread_percent(values: Sequence[float]) -> float | None:
    """Return (largest - smallest) / median in percent, or None for fewer than two values."""
    if len(values) < 2:
        return None
    return float(100.0 * (max(values) - min(values)) / np.median(values))


def _resampled_medians(values: Sequence[float], seed: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    drawn = np.random.default_rng(seed).choice(np.asarray(values, dtype=np.float64), size=(RESAMPLES, len(values)))
    return np.asarray(np.median(drawn, axis=1), dtype=np.float64)


def _interval(statistics: np.ndarray[tuple[int], np.dtype[np.float64]]) -> tuple[float, float]:
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(statistics, [tail, 100 - tail])
    return float(low), float(high)
