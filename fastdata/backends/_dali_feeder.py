"""An epoch's feeds for DALI, made ahead and handed out in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future

from fastdata.backends._dali_feed import Feed, FeedMaker
from fastdata.pipeline import EpochPlan, StepPlan


class Feeder:
    """Keeps some feeds of one epoch in work. Used by one thread."""

    def __init__(self, maker: FeedMaker, plan: EpochPlan, ahead: int) -> None:
        """Begin the first feeds.

        Args:
            maker: Makes the feeds; others may use it too.
            plan: The epoch.
            ahead: Feeds in work or ready.
        """
        self._maker = maker
        self._steps: Iterator[StepPlan] = iter(plan)
        self._ahead = ahead
        self._begun: deque[Future[Feed]] = deque()
        self._begin()

    @property
    def exhausted(self) -> bool:
        """Whether `next` has nothing more to give."""
        return not self._begun

    def next(self, *, block: bool) -> Feed | None:
        """Return the next feed; None at the end of the epoch, or where none is ready and `block` is off.

        Raises:
            Exception: What making it failed of; there are no more feeds then.
        """
        if not self._begun or not (block or self._begun[0].done()):
            return None
        first = self._begun.popleft()
        try:
            feed = first.result()
        except BaseException:
            self.stop()
            raise
        self._begin()
        return feed

    def stop(self) -> None:
        """Begin no more, wait for what is in work, and give its memory back. Idempotent."""
        self._steps = iter(())
        while self._begun:
            future = self._begun.popleft()
            if not future.cancel() and future.exception() is None:
                self._maker.give_back(future.result())

    def _begin(self) -> None:
        while len(self._begun) < self._ahead and (step := next(self._steps, None)) is not None:
            self._begun.append(self._maker.begin(step))
