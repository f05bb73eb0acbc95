"""The epochs in work: the one that is delivered, and the next, begun while the workers have room.

So no gap opens between epochs. Used by one thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from fastdata.pipeline import EpochPlan

Item = TypeVar("Item")
ItemOut = TypeVar("ItemOut", covariant=True)
Work = TypeVar("Work")


class Supply(Protocol[ItemOut]):
    """Gives what the steps of one epoch begin with, in order."""

    @property
    def exhausted(self) -> bool:
        """Whether `next` has nothing more to give; may be known only after it gave nothing."""
        ...

    def next(self, *, block: bool) -> ItemOut | None:
        """Return the next item; None at the end of the epoch, or where none is ready and `block` is off."""
        ...

    def stop(self) -> None:
        """Give no more, and free what is held. Idempotent."""
        ...


@dataclass
class Lane(Generic[Item, Work]):
    """One epoch in work."""

    plan: EpochPlan
    """What it delivers."""
    supply: Supply[Item]
    """Gives its items."""
    running: deque[Work] = field(default_factory=deque)
    """Steps that were begun, oldest first; whoever delivers takes them out."""
    error: Exception | None = None
    """What beginning a step raised while the epoch before was still running."""


class EpochsInWork(Generic[Item, Work]):
    """Begins steps of an epoch and of the one after it."""

    def __init__(
        self,
        supply: Callable[[EpochPlan], Supply[Item]],
        begin: Callable[[Item], Work],
        give_up: Callable[[Sequence[Work]], None],
        following: Callable[[EpochPlan], EpochPlan] | None,
    ) -> None:
        """Take what differs between backends.

        Args:
            supply: Opens an epoch.
            begin: Begins a step.
            give_up: Ends steps that nobody will take, oldest first, so that their memory may be reused.
            following: Returns the plan of the epoch after one; None where no epoch is begun ahead.
        """
        self._supply, self._begin, self._give_up, self._following = supply, begin, give_up, following
        self._ahead: Lane[Item, Work] | None = None

    def take(self, plan: EpochPlan) -> Lane[Item, Work]:
        """Return the epoch's lane: the one begun ahead, if it is for this epoch from this place, else a new one."""
        ahead = self._ahead
        if ahead is not None and (ahead.plan.epoch, ahead.plan.steps.done) == (plan.epoch, plan.steps.done):
            self._ahead = None
            return ahead
        self.drop_ahead()
        return Lane(plan, self._supply(plan))

    def fill(self, lane: Lane[Item, Work], room: int) -> None:
        """Begin steps of this epoch until `room` are running, then, if it has no more, of the next one.

        Raises:
            Exception: What beginning a step of this epoch failed of, if need be while the epoch before was running.
        """
        if lane.error is not None:
            raise lane.error
        self._begin_some(lane, room)
        if not lane.supply.exhausted or self._following is None:
            return
        if self._ahead is None:
            plan = self._following(lane.plan)
            self._ahead = Lane(plan, self._supply(plan))
        if self._ahead.error is None:
            try:
                self._begin_some(self._ahead, room - len(lane.running), may_block=False)
            except Exception as exc:  # belongs to the next epoch, and is raised there
                self._ahead.error = exc

    def running_ahead(self) -> Sequence[Work]:
        """Return the steps of the next epoch that were begun, oldest first."""
        return () if self._ahead is None else tuple(self._ahead.running)

    def abandon(self, lane: Lane[Item, Work], *, and_ahead: bool = False) -> None:
        """Stop an epoch before its end, and the next one where `and_ahead` says so; nobody will take their steps."""
        lanes = [lane]
        if and_ahead and self._ahead is not None:
            lanes.append(self._ahead)
            self._ahead = None
        for each in lanes:
            each.supply.stop()
        self._give_up([work for each in lanes for work in each.running])
        for each in lanes:
            each.running.clear()

    def drop_ahead(self) -> None:
        """Stop the next epoch, if it was begun."""
        if self._ahead is not None:
            ahead, self._ahead = self._ahead, None
            self.abandon(ahead)

    def _begin_some(self, lane: Lane[Item, Work], room: int, *, may_block: bool = True) -> None:
        while len(lane.running) < room:
            item = lane.supply.next(block=may_block and not lane.running)
            if item is None:
                return
            lane.running.append(self._begin(item))
