"""Intervals over repeats: that they hold what they say, and seldom call equal sides different."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fastdata.spread import (
    MIN_REPEATS,
    median_confidence,
    median_interval,
    rank_sum_counts,
    ratio_interval,
    spread_percent,
)


def test_the_interval_of_a_median_narrows_with_the_spread_and_with_repeats() -> None:
    assert median_interval([100, 90, 110, 105, 95]) == (90, 110)
    assert median_interval([99, 99.5, 100, 100.5, 101]) == (99, 101)
    assert median_interval(range(20)) == (5, 14)
    assert median_interval([100.0] * 4) is None
    assert ratio_interval([100.0] * 5, [100.0] * 4) is None
    assert spread_percent([90.0, 100.0, 110.0]) == pytest.approx(20.0)


DISTRIBUTIONS: dict[str, Callable[[np.random.Generator, int], Any]] = {
    "normal": lambda rng, count: rng.normal(1000, 30, count),
    "skewed": lambda rng, count: 1000 - rng.exponential(60, count) + 60 * np.log(2),  # a machine only slows down
    "heavy tails": lambda rng, count: 1000 + 10 * rng.standard_t(2, count),
}
"""Rates whose median is 1000."""


@pytest.mark.parametrize("repeats", [5, 6, 7, 10])
@pytest.mark.parametrize("draw", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS.keys())
def test_the_interval_holds_the_median_as_often_as_it_says(draw: Callable[..., Any], repeats: int) -> None:
    rng = np.random.default_rng(1)
    held = 0
    for _ in range(4000):
        low, high = median_interval(draw(rng, repeats)) or (0, 0)
        held += low <= 1000 <= high
    confidence = median_confidence(repeats)
    assert confidence is not None
    assert confidence >= (0.95 if repeats > MIN_REPEATS else 0.9)
    assert held / 4000 == pytest.approx(confidence, abs=0.015)  # four standard deviations


@pytest.mark.parametrize(("before", "after"), [(5, 5), (5, 9), (7, 7)])
@pytest.mark.parametrize("draw", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS.keys())
def test_equal_sides_are_called_different_in_at_most_one_of_twenty(
    draw: Callable[..., Any], before: int, after: int
) -> None:
    rng = np.random.default_rng(2)
    different = 0
    for _ in range(2000):
        first, second = draw(rng, before), draw(rng, after)
        low, high = ratio_interval(first, second) or (0, 0)
        assert low <= np.median(second) / np.median(first) <= high
        different += low > 1 or high < 1
    assert different / 2000 < 0.055


def test_sides_that_do_not_overlap_are_called_different_at_five_repeats() -> None:
    low, high = ratio_interval([100, 101, 102, 103, 104], [110, 111, 112, 113, 114]) or (0, 0)
    assert 1 < low < 112 / 102 < high


def test_orderings_of_two_samples_are_counted_as_if_they_were_listed() -> None:
    listed = [0] * 13
    for places in itertools.combinations(range(7), 3):
        listed[sum(place - i for i, place in enumerate(places))] += 1
    assert rank_sum_counts(3, 4) == listed
