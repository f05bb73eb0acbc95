"""How backends begin the next epoch while one ends: order, room, errors and what is given up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from fastdata.backends._epochs import EpochsInWork


def plan(epoch: int, done: int = 0) -> Any:
    return SimpleNamespace(epoch=epoch, steps=SimpleNamespace(done=done))


@dataclass
class Log:
    """Epochs of three steps each, and what was done with them."""

    begun: list[tuple[int, int]] = field(default_factory=list)
    given_up: list[tuple[int, int]] = field(default_factory=list)
    stopped: list[int] = field(default_factory=list)
    failing: tuple[int, int] | None = None

    def begin(self, step: tuple[int, int]) -> tuple[int, int]:
        if step == self.failing:
            raise ValueError(f"step {step}")
        self.begun.append(step)
        return step

    def give_up(self, steps: Sequence[tuple[int, int]]) -> None:
        self.given_up += steps

    def epochs(self, *, ahead: bool = True) -> EpochsInWork[tuple[int, int], tuple[int, int]]:
        following = (lambda before: plan(before.epoch + 1)) if ahead else None
        return EpochsInWork(lambda of: ThreeSteps(self, of.epoch), self.begin, self.give_up, following)


class ThreeSteps:
    """Gives three steps of an epoch."""

    def __init__(self, log: Log, epoch: int) -> None:
        self._log, self._epoch = log, epoch
        self._left = [(epoch, number) for number in range(3)]

    @property
    def exhausted(self) -> bool:
        return not self._left

    def next(self, *, block: bool) -> tuple[int, int] | None:  # noqa: ARG002 - all are ready
        return self._left.pop(0) if self._left else None

    def stop(self) -> None:
        self._left.clear()
        self._log.stopped.append(self._epoch)


def test_the_next_epoch_begins_in_the_room_that_the_last_steps_leave() -> None:
    log = Log()
    epochs = log.epochs()
    lane = epochs.take(plan(0))
    for expected in ([(0, 0), (0, 1)], [(0, 2)], [(1, 0)], [(1, 1)]):
        before = len(log.begun)
        epochs.fill(lane, 2)
        assert log.begun[before:] == expected
        if lane.running:
            lane.running.popleft()
    assert epochs.running_ahead() == ((1, 0), (1, 1))
    following = epochs.take(plan(1))
    assert list(following.running) == [(1, 0), (1, 1)]
    assert epochs.running_ahead() == ()


def test_without_a_following_epoch_none_is_begun() -> None:
    log = Log()
    epochs = log.epochs(ahead=False)
    epochs.fill(epochs.take(plan(0)), 9)
    assert log.begun == [(0, 0), (0, 1), (0, 2)]


@pytest.mark.parametrize("wanted", [plan(0), plan(2), plan(1, done=8)])
def test_another_epoch_than_the_one_begun_ahead_gives_that_one_up(wanted: Any) -> None:
    log = Log()
    epochs = log.epochs()
    epochs.fill(epochs.take(plan(0)), 5)
    assert not epochs.take(wanted).running
    assert (log.given_up, log.stopped) == ([(1, 0), (1, 1)], [1])


def test_what_fails_ahead_is_raised_in_its_own_epoch() -> None:
    log = Log(failing=(1, 0))
    epochs = log.epochs()
    lane = epochs.take(plan(0))
    for _ in range(3):
        epochs.fill(lane, 4)
    following = epochs.take(plan(1))
    with pytest.raises(ValueError, match=r"step \(1, 0\)"):
        epochs.fill(following, 4)


@pytest.mark.parametrize("and_ahead", [False, True])
def test_abandoning_an_epoch_gives_up_the_next_one_only_where_asked(and_ahead: bool) -> None:
    log = Log()
    epochs = log.epochs()
    lane = epochs.take(plan(0))
    epochs.fill(lane, 4)
    epochs.abandon(lane, and_ahead=and_ahead)
    assert log.given_up == [(0, 0), (0, 1), (0, 2), *([(1, 0)] * and_ahead)]
    assert epochs.running_ahead() == (() if and_ahead else ((1, 0),))
    assert not lane.running
