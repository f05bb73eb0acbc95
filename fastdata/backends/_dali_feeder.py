"""The thread that makes an epoch's feeds for DALI ahead of time."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from concurrent.futures import Future, wait

from fastdata.backends._dali_feed import Feed, FeedMaker, ReadSamples
from fastdata.pipeline import EpochPlan, StepPlan


class Feeder:
    """A thread that makes the feeds of one epoch, some ahead, in order."""

    def __init__(self, maker: FeedMaker, plan: EpochPlan, ahead: int) -> None:
        """Start.

        Args:
            maker: Makes the feeds; others may use it too.
            plan: The epoch.
            ahead: Feeds that may lie ready, and steps that are read ahead of the one in work.
        """
        self._maker = maker
        self._plan = plan
        self._ahead = ahead
        self._ready: queue.Queue[Feed | BaseException | None] = queue.Queue(maxsize=ahead)
        self._stopped = threading.Event()
        self._exhausted = False
        self._thread = threading.Thread(target=self._run, name="fastdata-dali-feed", daemon=True)
        self._thread.start()

    @property
    def exhausted(self) -> bool:
        """Whether `next` has nothing more to give."""
        return self._exhausted

    def next(self, *, block: bool) -> Feed | None:
        """Return the next feed; None at the end of the epoch, or where none is ready and `block` is off.

        Raises:
            Exception: What the thread died of.
        """
        if self._exhausted:
            return None
        try:
            item = self._ready.get(block=block)
        except queue.Empty:
            return None
        if item is None:
            self._exhausted = True
            return None
        if isinstance(item, BaseException):
            self._exhausted = True
            raise item
        return item

    def stop(self) -> None:
        """End the thread; feeds that nobody took are given back. Idempotent."""
        self._stopped.set()
        while self._thread.is_alive():
            self._drop_ready()
            self._thread.join(0.01)
        self._drop_ready()
        self._exhausted = True

    def _drop_ready(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                item = self._ready.get_nowait()
                if isinstance(item, Feed):
                    self._maker.give_back(item)

    def _run(self) -> None:
        reading: deque[tuple[StepPlan, list[Future[ReadSamples]]]] = deque()
        try:
            steps = iter(self._plan)
            while not self._stopped.is_set():
                while len(reading) <= self._ahead and (step := next(steps, None)) is not None:
                    reading.append((step, self._maker.read(step)))
                if not reading:
                    break
                self._ready.put(self._maker.make(*reading.popleft()))
        except BaseException as exc:  # handed to the consumer, who raises it
            self._ready.put(exc)
        else:
            self._ready.put(None)
        finally:
            for _, reads in reading:
                for read in reads:
                    read.cancel()
                wait(reads)
